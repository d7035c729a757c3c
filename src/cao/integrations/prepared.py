"""An optimizer in Accelerate's wrapper, which transformers uses too, with its own methods within reach."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from cao.cao import CAO
from cao.lbfgs import SketchedLBFGS


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which also forwards `refresh_if_due`, `sketch`, `report` and the like to the optimizer."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer inside."""
        if name == "optimizer":  # While a copy is made there is none yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def with_own_methods(prepared: Any) -> Any:
    """Return what Accelerate has prepared; a wrapper of one of our optimizers forwards what it does not know."""
    if type(prepared) is AcceleratedOptimizer and isinstance(prepared.optimizer, CAO | SketchedLBFGS):
        prepared.__class__ = PreparedOptimizer
    return prepared

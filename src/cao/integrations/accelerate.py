"""CAO with Accelerate: an `Accelerator` whose `prepare` keeps the optimizer's own methods within reach."""

from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from cao.lbfgs import SketchedLBFGS
from cao.optimizer import CAO


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which also forwards `refresh_if_due`, `sketch`, `report` and the like to the optimizer."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer inside."""
        if name == "optimizer":  # While a copy is made there is none yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class Accelerator(accelerate.Accelerator):
    """Accelerate's own, except that `prepare` keeps `refresh_if_due` within reach.

    Refresh before `accelerator.backward(loss)`, which divides and scales the loss.
    """

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer for the devices and processes at hand."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if isinstance(prepared.optimizer, CAO | SketchedLBFGS):
            prepared.__class__ = PreparedOptimizer
        return prepared

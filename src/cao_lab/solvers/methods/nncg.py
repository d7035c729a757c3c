"""NysNewton-CG of Rathore et al. 2024, as deepxde ships it: an extra, loaded only when it is used."""

from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cao_lab.solvers.config import SolveError
from cao_lab.solvers.methods.quasi_newton import TorchLBFGS
from cao_lab.solvers.objective import Objective, default_dtype, flat
from cao_lab.solvers.price import Products, hessian_product
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class NNCG:
    """Newton's direction by conjugate gradients, preconditioned by a Nyström sketch; the defaults are deepxde's."""

    rank: int = 50
    damping: float = 0.1
    refresh_every: int = 20
    max_products: int = 1_000
    tolerance: float = 1e-16
    retries: int = 10
    """Sketches to try in a row: where the Hessian is indefinite, deepxde's Cholesky factorisation may fail by
    round-off, and another random sketch often succeeds."""
    lbfgs_share: float = 0.0
    """Share of the budget that goes to L-BFGS first, as its authors use it."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The name tells whether L-BFGS comes first."""
        return "lbfgs-nncg" if self.lbfgs_share else "nncg"

    def products(self, problem: Problem) -> Products | None:
        """Return a product with the Hessian."""
        return hessian_product(problem)

    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or the sketch fails."""
        start_with_lbfgs(objective, self.lbfgs_share)
        optimizer = counting(deepxde_module().NNCG, objective)(
            objective.params,
            rank=min(self.rank, objective.problem.size),
            mu=self.damping,
            update_freq=self.refresh_every,
            cg_tol=self.tolerance,
            cg_max_iters=self.max_products,
            line_search_fn="armijo",
        )
        # It makes its own vectors in the default precision, from the global stream.
        with default_dtype(objective.params[0].dtype), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            failures = 0
            while failures < self.retries:
                try:
                    optimizer.step(objective.graph)
                    failures = 0
                except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                    failures += 1
        return f"{self.retries} sketches in a row could not be factorised"


def start_with_lbfgs(objective: Objective, share: float) -> None:
    """Spend a share of the budget on L-BFGS, or less if it stalls."""
    optimizer = TorchLBFGS().optimizer(objective, max_iter=20)
    before = None
    while objective.spent < share and (before is None or not torch.equal(before, flat(objective.params))):
        before = flat(objective.params)
        optimizer.step(objective.closure)


def counting(nncg: type, objective: Objective) -> Any:
    """Return the class with a meter on its products."""

    class Counting(nncg):  # type: ignore[misc]
        def _hvp(self, *arguments: Any) -> Tensor:
            product: Tensor = super()._hvp(*arguments)
            objective.bill(1)
            return product

    return Counting


def deepxde_module() -> ModuleType:
    """Load the one file of deepxde that is needed.

    Importing the package takes seconds, asks for a backend, and moves torch's default device to a GPU.
    """
    package = find_spec("deepxde")
    if package is None or not package.submodule_search_locations:
        raise SolveError("nncg needs deepxde; pip install 'cao-optimizer[peers]'")
    path = Path(package.submodule_search_locations[0]) / "optimizers" / "pytorch" / "nncg.py"
    spec = spec_from_file_location("deepxde_nncg", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SolveError(f"this version of deepxde has no {path.name}; pip install 'deepxde==1.15.0'")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    # It prints a warning at every step whose conjugate gradients end at their limit.
    module.__dict__["print"] = lambda *arguments: None
    return module


METHODS = (NNCG(), NNCG(lbfgs_share=0.5))

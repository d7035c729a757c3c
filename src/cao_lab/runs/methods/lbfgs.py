"""L-BFGS, torch's own and this project's over a sketch, for full batches."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cao_lab.runs.loss import BatchLoss
    from cao_lab.runs.stepper import OnRefresh, Stepper

# What an iteration takes in the mean, the line search included.
GRADIENTS_PER_ITERATION = 1.25


@dataclass(frozen=True)
class LBFGSConfig(Settings):
    """L-BFGS (torch.optim.LBFGS), for full batches: --batch-size None."""

    name: tyro.conf.Suppress[Literal["lbfgs"]] = "lbfgs"
    lr: float = 1.0
    """Learning rate, or the first trial of the line search."""
    max_iterations: int = 10
    """Iterations in a step, each with one or more gradients."""
    history: int = 10
    """Pairs of differences kept."""
    line_search: Literal["strong-wolfe", "none"] = "strong-wolfe"
    """How the length of an iteration is found."""

    needs_full_batch: ClassVar[bool] = True
    at_least_one: ClassVar[tuple[str, ...]] = ("max_iterations", "history")

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build torch's L-BFGS, which takes as many gradients as it needs from each batch."""
        from torch.optim import LBFGS

        from cao_lab.runs.stepper import Stepper, trainable

        optimizer = LBFGS(
            trainable(model),
            lr=self.lr,
            max_iter=self.max_iterations,
            history_size=self.history,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe" if self.line_search == "strong-wolfe" else None,
        )

        def step(batch_loss: "BatchLoss", _: "OnRefresh") -> None:
            def closure() -> "Tensor":
                optimizer.zero_grad()
                loss = batch_loss()
                loss.backward()
                return batch_loss.value(loss)

            optimizer.step(closure)

        return Stepper(optimizer, step)

    def gradients_per_step(self, product: float) -> float:
        """Return the gradients of all iterations."""
        return self.max_iterations * GRADIENTS_PER_ITERATION


@dataclass(frozen=True)
class SketchedLBFGSConfig(Settings):
    """L-BFGS over a sketch of the curvature, with its defaults, for full batches: --batch-size None."""

    name: tyro.conf.Suppress[Literal["sketched-lbfgs"]] = "sketched-lbfgs"
    lr: float = 1.0
    """The first trial of the line search."""
    max_iterations: int = 10
    """Iterations in a step, each with one or more gradients."""

    needs_full_batch: ClassVar[bool] = True
    at_least_one: ClassVar[tuple[str, ...]] = ("max_iterations",)

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build SketchedLBFGS, whose source of curvature is the matrix that the run's config names."""
        from cao import SketchedLBFGS
        from cao_lab.runs.stepper import Stepper, trainable

        optimizer = SketchedLBFGS(trainable(model), lr=self.lr, max_iter=self.max_iterations, seed=seed)

        def step(batch_loss: "BatchLoss", _: "OnRefresh") -> None:
            def closure() -> "Tensor":
                optimizer.zero_grad()
                loss = batch_loss()
                loss.backward()
                return batch_loss.value(loss)

            optimizer.source = batch_loss.curvature(None)
            optimizer.step(closure)

        return Stepper(optimizer, step, lambda: optimizer.status.products, lambda: optimizer.status.refreshes)

    def gradients_per_step(self, product: float) -> float:
        """Return the gradients of all iterations; how much curvature they will take is not known beforehand."""
        return self.max_iterations * GRADIENTS_PER_ITERATION

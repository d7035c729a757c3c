"""The one place where a matrix of curvature is made: for training, for `cao spectrum` and for `cao bench`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cao import GaussNewton, Hessian, Mean
from cao.autograd.isolation import isolated_forward
from cao.curvature.operators import ParameterOperator
from cao_lab.facts import CurvatureName
from cao_lab.tasks.data import Batch


@dataclass(frozen=True)
class SampledLoss:
    """A model's mean loss over fixed samples, taken in parts so that memory holds the graph of one at a time."""

    model: nn.Module
    loss_of_outputs: Callable[[Tensor, Tensor], Tensor]
    parts: Sequence[Batch]
    l2: float = 0.0
    """Adds l2/2·‖θ‖²."""
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    """The precision in which the loss is taken; Gauss-Newton matrices have the parameters' own."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that can be trained, in the model's order."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(len(targets) for _, targets in self.parts)

    def losses(self) -> Iterator[Float[Tensor, ""]]:
        """Run the model on each part; the mean of what is yielded is the mean over all samples."""
        for inputs, targets in self.parts:
            with self.autocast():
                loss = self.part_loss(self.model(inputs), targets)
            yield loss

    def part_loss(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Return the loss of one part, weighted by its size."""
        return self.loss_of_outputs(outputs, targets) * (len(targets) * len(self.parts) / self.samples)

    def loss(self) -> float:
        """Return the loss over all samples, and leave no trace in the model."""
        with isolated_forward(self.params[0].device), torch.no_grad():
            mean = sum(float(loss) for loss in self.losses()) / len(self.parts)
        return mean + self.l2 / 2 * sum(float(p.detach().double().square().sum()) for p in self.params)

    def curvature(self, kind: CurvatureName) -> ParameterOperator:
        """Return the matrix of the loss."""
        matrix = MATRICES[kind](self)
        return Shifted(matrix, self.l2) if self.l2 else matrix


def hessian(sampled: SampledLoss) -> ParameterOperator:
    """Return the exact Hessian, from the losses of the parts."""
    return Hessian(sampled.losses, sampled.params)


def gauss_newton(sampled: SampledLoss) -> ParameterOperator:
    """Return the mean of the Gauss-Newton matrices of the parts."""

    def part(inputs: Tensor, targets: Tensor) -> GaussNewton:
        return GaussNewton(sampled.model, inputs, lambda outputs: sampled.part_loss(outputs, targets), sampled.params)

    matrices = [part(*batch) for batch in sampled.parts]
    return matrices[0] if len(matrices) == 1 else Mean(matrices)


MATRICES: Mapping[str, Callable[[SampledLoss], ParameterOperator]] = {"hessian": hessian, "gauss-newton": gauss_newton}
"""How each matrix of `facts.CURVATURES` is made."""


class Shifted:
    """An operator with a multiple of the identity added."""

    def __init__(self, operator: ParameterOperator, shift: float) -> None:
        self.operator, self.shift, self.params = operator, shift, operator.params

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return (A + shift·I) times each column."""
        return (self.operator @ columns).add_(columns, alpha=self.shift)

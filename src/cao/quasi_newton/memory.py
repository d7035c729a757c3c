"""What a quasi-Newton method remembers: pairs over a sketch first, then a dense matrix made of them."""

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

# A dense matrix has so many numbers at most: 2 GiB in float64.
LARGEST_MATRIX = 2**28

# An update passes over P² numbers, an evaluation of m residuals over about 2mP. So many parameters per residual make an
# update as dear as two evaluations. Where residuals are not known, an evaluation may be very cheap.
PARAMETERS_PER_RESIDUAL = 4
LARGEST_UNKNOWN = 1000


class Memory(Protocol):
    """What is known of the inverse Hessian H. Its entries of the optimizer's state are all that it has.

    One memory hands over to the next: that one is made of it, with what it has learnt, and takes its place until it is
    told to forget.
    """

    name: str

    @property
    def has_learnt(self) -> bool:
        """Whether there is anything to forget."""

    def __matmul__(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the product with a gradient."""

    def first_step(self, rate: float, slope: float, decrease: float) -> float:
        """Return the step that the search along a direction tries first, after one that brought a decrease."""

    def learn(self, step: Float[Tensor, " n"], change: Float[Tensor, " n"], image: Float[Tensor, " n"]) -> None:
        """Learn from a step, the gradient's change along it, and the step's image under H⁻¹."""

    def forget(self) -> None:
        """Leave the state to pairs over the sketch, and to none of them."""


def is_dense_affordable(size: int, residuals: int) -> bool:
    """Whether a dense matrix fits, and an update takes no longer than two evaluations of that many residuals.

    Both are counted, because a clock would make two runs of the same program differ; no residuals means not known.
    """
    return size**2 <= LARGEST_MATRIX and size <= max(PARAMETERS_PER_RESIDUAL * residuals, LARGEST_UNKNOWN)

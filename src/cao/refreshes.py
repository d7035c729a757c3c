"""When L-BFGS sketches the curvature anew, how many eigenpairs it looks for, and from where."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.eigensolvers import SubspaceIteration
from cao.least_squares import LeastSquares
from cao.linalg import Eigenpairs, random_columns
from cao.linearized import ExplicitLinearized, Linearized
from cao.operators import AllReduced, ParameterOperator

# Prices are in evaluations of loss and gradient, measured on networks of 900 to 20,000 parameters. They are constants,
# because a clock would make two runs of the same program differ. A Jacobian has its price for each residual of a point.
EXPLICIT_PRICE = 10.0
PRODUCT_PRICE = 1.25

# The share of the whole cost, evaluations and sketches, beyond which no sketch is begun unless a search has failed:
# with one half, sketches that bring nothing can hardly do more than double the cost.
LARGEST_SHARE = 0.5

# Columns of a Jacobian in memory are nearly free; any others may cost a hundred evaluations per sketch.
LARGEST_EXPLICIT_RANK = 128
LARGEST_RANK = 64


def has_slowed(trace: Sequence[Sequence[float]], price: float) -> bool:
    """Whether the loss falls more slowly than it did on average since the last sketch, the sketch's price included.

    Then a new sketch pays, if it serves as well as the last one did (the marginal value theorem of foraging). The trace
    holds evaluations and losses since the last sketch; the present rate is that over half the price of a sketch. Losses
    are compared by their logarithms, and by themselves where they are not positive.
    """
    (start, first), (now, last) = trace[0], trace[-1]
    window = [(then, value) for then, value in trace if now - then >= price / 2]
    if not window or now == start:
        return False
    then, value = window[-1]
    if first <= 0 or last <= 0:
        return (value - last) / (now - then) < (first - last) / (now - start + price)
    return math.log(value / last) / (now - then) < math.log(first / last) / (now - start + price)


def is_affordable(paid: float, evaluations: int) -> bool:
    """Whether sketches so far, at their price in evaluations, have taken no more than their share of the whole cost."""
    return paid <= LARGEST_SHARE * (paid + evaluations)


def within_reach(trace: list[list[float]], price: float) -> list[list[float]]:
    """Return the trace without what `has_slowed` will never look at again, since its window only moves on."""
    passed = sum(trace[-1][0] - then >= price / 2 for then, _ in trace)
    return trace[:1] + trace[max(passed - 1, 1) :]


def first_price(source: object, rank: int | str, size: int) -> float:
    """Return the price of the first sketch: of a Jacobian, if there may be one, else of two products per column."""
    columns = min(LARGEST_RANK // 2 if isinstance(rank, str) else rank, size)
    return EXPLICIT_PRICE if isinstance(source, LeastSquares) else 2 * PRODUCT_PRICE * columns


def next_rank(operator: ParameterOperator, values: Float[Tensor, " k"], least_damping: float) -> int:
    """Return how many eigenpairs to look for: those above the smallest damping that was fitted, and a reserve.

    Eigenvalues below the damping change nothing: what they would scale is scaled by the damping.
    """
    largest = LARGEST_EXPLICIT_RANK if isinstance(operator, ExplicitLinearized) else LARGEST_RANK
    if not len(values):
        return largest // 2
    if math.isinf(least_damping):  # No pair has told.
        return len(values)
    return min(largest, int((values > least_damping).sum()) * 3 // 2 + 8)


def start_columns(
    known: Float[Tensor, "k n"] | None, like: Float[Tensor, " n"], rank: int, seed: int
) -> Float[Tensor, "n r"]:
    """Return the last sketch's vectors, and random columns for what they lack to the rank."""
    rank = min(rank, len(like))
    generator = torch.Generator(like.device).manual_seed(seed)
    columns = random_columns(len(like), rank, generator, like.dtype)
    if known is not None:
        columns[:, : len(known)] = known[:rank].T
    return columns


def eigenpairs(
    operator: ParameterOperator, start: Float[Tensor, "n k"], group: dist.ProcessGroup | None
) -> tuple[Eigenpairs, float]:
    """Return the operator's largest eigenpairs, the mean over all processes, and their price in evaluations."""
    if dist.is_available() and dist.is_initialized():
        pairs = SubspaceIteration(1)(AllReduced(operator, group), start)
    elif isinstance(operator, Linearized):
        pairs = operator.eigenpairs(start)
    else:
        pairs = SubspaceIteration(1)(operator, start)
    price = PRODUCT_PRICE * pairs.products
    if isinstance(operator, ExplicitLinearized):
        price = EXPLICIT_PRICE * operator.per_point
    return pairs, largest_of_all(price, start.device, group)


def largest_of_all(number: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the largest of all processes' numbers: what they decide by must be the same, or one waits for ever."""
    if not (dist.is_available() and dist.is_initialized()):
        return number
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return float(largest)

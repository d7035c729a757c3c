"""When L-BFGS sketches the curvature anew, how many eigenpairs it looks for, and from where."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.curvature.least_squares import LeastSquares
from cao.curvature.linearized import Linearized
from cao.curvature.operators import AllReduced, ParameterOperator
from cao.linalg.columns import HERE, Eigenpairs, generator_for
from cao.linalg.eigensolvers import SubspaceIteration
from cao.prices import JACOBIAN, LEAST_SQUARES_PRODUCT

# The share of the whole cost, evaluations and sketches, beyond which no sketch is begun unless a search has failed:
# with one half, sketches that bring nothing can hardly do more than double the cost.
LARGEST_SHARE = 0.5

# What the loss must fall by while half a dense matrix could be learnt: that one brings about as much, and goes on so.
SETTLED = 10.0

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
    if min(first, value, last) <= 0:
        return (value - last) / (now - then) < (first - last) / (now - start + price)
    return math.log(value / last) / (now - then) < math.log(first / last) / (now - start + price)


def has_settled(landmarks: Sequence[Sequence[float]], window: float) -> bool:
    """Whether sketches have stopped to pay: the loss fell by less than a factor of `SETTLED` within the window.

    The landmarks hold the whole cost so far and the loss: at each sketch, and now. A loss below zero never settles.
    """
    now, last = landmarks[-1]
    before = [value for cost, value in landmarks if now - cost >= window]
    return bool(before) and not before[-1] > SETTLED * last


def settling_window(size: int, price: float) -> float:
    """Return the cost over which the loss is watched: a matrix is learnt in about as many iterations as parameters.

    With few parameters sketches hold nearly all directions, and deserve a longer trial.
    """
    return max(size / 2, 25 * price)


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
    return JACOBIAN if isinstance(source, LeastSquares) else 2 * LEAST_SQUARES_PRODUCT * columns


def jacobian_price(operator: Linearized) -> float:
    """Return the price of the Jacobians of a sketch in evaluations."""
    return operator.jacobians * (JACOBIAN * operator.per_point + LEAST_SQUARES_PRODUCT * operator.single_columns)


def next_rank(operator: ParameterOperator, values: Float[Tensor, " k"], least_damping: float) -> int:
    """Return how many eigenpairs to look for: those above the smallest damping that was fitted, and a reserve.

    Eigenvalues below the damping change nothing: what they would scale is scaled by the damping.
    """
    largest = LARGEST_EXPLICIT_RANK if isinstance(operator, Linearized) and operator.jacobians else LARGEST_RANK
    if not len(values):
        return largest // 2
    if math.isinf(least_damping):  # No pair has told.
        return len(values)
    return min(largest, int((values > least_damping).sum()) * 3 // 2 + 8)


def start_columns(
    known: Float[Tensor, "k n"] | None, like: Float[Tensor, " n"], rank: int, *seed: int
) -> Float[Tensor, "n r"]:
    """Return the last sketch's vectors, and random columns for what they lack to the rank."""
    rank = min(rank, len(like))
    generator = generator_for(like.device, *seed)
    columns = HERE.random(len(like), rank, generator, like.dtype)
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
    price = LEAST_SQUARES_PRODUCT * pairs.products
    if isinstance(operator, Linearized) and operator.jacobians:
        price = jacobian_price(operator)
    return pairs, largest_of_all(price, start.device, group)


def largest_of_all(number: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the largest of all processes' numbers: what they decide by must be the same, or one waits for ever."""
    if not (dist.is_available() and dist.is_initialized()):
        return number
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return float(largest)

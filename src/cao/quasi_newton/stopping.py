"""When a step of SketchedLBFGS ends, and how it notices that only rounding is left to minimise."""

import math

from jaxtyping import Float
from torch import Tensor, finfo

from cao.quasi_newton.objective import Iterate
from cao.quasi_newton.progress import Progress, Reason

# The error of a loss, in units of its last digit.
ROUNDING = 10

# A search that fails is followed by one over a new sketch or without the pairs, if there is a sketch to make or a pair
# to forget, by one in very short steps, and by none.
FAILURES_TO_STOP = 3

# After so many quiet iterations the pairs are forgotten and a sketch is made; after as many more it ends.
PATIENCE = 10

# A loss above this share of the first one is far from zero: residuals are 3 % of what they were.
FAR_FROM_ZERO = 1e-3
# It stands still where it was less than this times as high half of all evaluations ago, of so many at least.
STANDSTILL, FEWEST = 1.1, 200


def watch(progress: Progress, here: Iterate) -> None:
    """Count quiet iterations: the loss reaches no new low beyond rounding, and the gradient leaves its range alone.

    A step is accepted only if the loss rises by no more than rounding, so that one quiet iteration after another means
    that rounding decides. A gradient that grows is no sign of that: it leads away from a saddle.
    """
    if progress.lowest - here.value > ROUNDING * finfo(here.gradient.dtype).eps * abs(here.value):
        progress.lowest, progress.smallest, progress.largest = here.value, here.largest, here.largest
        progress.quiet = 0
    elif not progress.smallest <= here.largest <= progress.largest:
        progress.smallest = min(progress.smallest, here.largest)
        progress.largest = max(progress.largest, here.largest)
        progress.quiet = 0
    else:
        progress.quiet += 1
    progress.last = here.value
    if not progress.marks or progress.evaluations >= 2 * progress.marks[-1][0]:
        progress.marks.append([progress.evaluations, here.value])


def stuck_at(progress: Progress) -> float:
    """Return where residuals have stopped falling far from zero: their size over that at the start, or zero.

    They have if the step before ended in a minimum, or if the loss has fallen by less than a tenth since half of all
    evaluations at least, a quarter at most, were left. Where the start was a minimum already nothing can be said.
    """
    share = progress.last / progress.first if progress.first > 0 else 0.0
    if not share > FAR_FROM_ZERO:
        return 0.0
    before = [value for count, value in progress.marks if 2 * count <= progress.evaluations]
    is_slow = progress.evaluations >= FEWEST and bool(before) and before[-1] < STANDSTILL * progress.last
    is_minimum = Reason(progress.reason).is_convergence and share < 1 / STANDSTILL
    return math.sqrt(share) if is_slow or is_minimum else 0.0


def begin(progress: Progress, here: Iterate) -> None:
    """Note where a step starts; a loss that has changed since the last one is watched anew."""
    if here.value != progress.last:
        progress.lowest, progress.quiet, progress.contradiction = math.inf, 0, []
        progress.first = here.value if math.isnan(progress.first) else progress.first
        watch(progress, here)


def reason_to_stop(progress: Progress, here: Iterate, tolerance_grad: float) -> Reason | None:
    """Return why no further iteration should be tried, if there is a reason."""
    if not here.is_finite:
        return Reason.NOT_FINITE
    if here.largest <= tolerance_grad:
        return Reason.TOLERANCE_GRAD
    if progress.contradiction and (progress.failures or progress.quiet >= PATIENCE):
        return Reason.NOT_ONE_FUNCTION
    if progress.failures == FAILURES_TO_STOP and here.value == progress.stalled_at:
        return Reason.ROUNDING if progress.hoped <= rounding_of(progress, here) else Reason.NO_DECREASE
    return Reason.ROUNDING if progress.quiet >= 2 * PATIENCE else None


def rounding_of(progress: Progress, here: Iterate) -> float:
    """Return the error of the loss: of its own digits, and of residuals that were as large as the first ones."""
    precision, first = ROUNDING * finfo(here.gradient.dtype).eps, progress.first
    return precision * abs(here.value) + precision**2 * abs(first)


def differ(one: float, other: float, like: Float[Tensor, " n"]) -> bool:
    """Whether two losses differ by more than half of their digits, more than the order of a sum may change."""
    return abs(one - other) > math.sqrt(finfo(like.dtype).eps) * max(abs(one), abs(other))

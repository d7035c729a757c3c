"""What a solver may spend, and what it has to show for it."""

from dataclasses import dataclass
from math import inf, nan

from cao_lab.log.records import SolveRecord


@dataclass(frozen=True)
class Budget:
    """Evaluations of the loss, products billed at their price, and seconds; whichever is spent first ends a run."""

    evaluations: float = inf
    seconds: float = inf

    def __post_init__(self) -> None:
        """Refuse a budget that never ends, or never begins."""
        if self.evaluations == self.seconds == inf:
            raise ValueError("a budget needs a number of evaluations or of seconds")
        for name in ("evaluations", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def spent(self, billed: float, seconds: float) -> float:
        """Return the share that is spent, 1 at the end."""
        return max(billed / self.evaluations, seconds / self.seconds)


@dataclass(frozen=True)
class Record(SolveRecord):
    """Where a run stands: a row of its log, and what is not written down row by row."""

    price: float
    """Time of a product over the time of an evaluation with its gradient."""
    setup_price: float
    """Time of a setup over the same."""
    status: str
    """running, spent, interrupted, failed (an exception ended it), "stalled: " and a reason, or idle: a stalled run
    waits for the end of its budget."""
    points: int = 0
    """Points in use when they were last compared with others, if they may grow."""
    held_out: float = nan
    """The mean square of the residuals at points that are held out, then."""

"""How many directions: rules as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from cao.linalg.eigensolvers import Lanczos, Solver, SubspaceIteration


@runtime_checkable
class Rank(Protocol):
    """How many directions a refresh looks for, and how many of those found the sketch keeps.

    A rule is a frozen value. Its state is the number of directions that it captured last, which `columns` is told.
    """

    def columns(self, kept: int) -> int:
        """Return the number of start columns, the kept directions of the last sketch among them."""
        ...

    def captured(self, values: Sequence[float], need: float) -> int:
        """Return how many of the eigenvalues, the most wanted first, are captured; the damping acts on λ ≥ need."""
        ...

    def solver(self, columns: int, need: float, iterations: int) -> Solver:
        """Return the eigensolver for that many columns, where the user does not choose one."""
        ...


@dataclass(frozen=True)
class Exactly:
    """A rank that the user has chosen."""

    rank: int

    def columns(self, kept: int) -> int:
        """Return the rank."""
        return self.rank

    def captured(self, values: Sequence[float], need: float) -> int:
        """Capture all."""
        return len(values)

    def solver(self, columns: int, need: float, iterations: int) -> Solver:
        """Return the paper's subspace iteration."""
        return SubspaceIteration(iterations)


@dataclass(frozen=True)
class ByNeed:
    """Every direction in which a plain step would overshoot, or might soon; none if there are none.

    These are the directions with λ ≥ share/lr. A refresh looks for a few more than the last one kept, so that the rank
    can grow; the first one that is not kept shows how sharp the rest is.
    """

    largest: int = 8
    share: float = 0.5
    """A direction is kept if its curvature is at least this share of 1/lr, where a plain step begins to overshoot."""
    reserve: int = 2
    """Start columns beyond the directions that the last sketch kept."""
    products: int = 12
    """Products of a refresh, unless twice the columns are more; fewer where nothing turns out to be sharp."""

    def columns(self, kept: int) -> int:
        """Return the directions kept and the reserve."""
        return min(kept, self.largest) + self.reserve

    def captured(self, values: Sequence[float], need: float) -> int:
        """Capture those that need it."""
        return min(sum(value >= self.share * need for value in values), self.largest)

    def solver(self, columns: int, need: float, iterations: int) -> Solver:
        """Return a block Lanczos method of the given number of products, which finds one direction more than needed."""
        blocks = max(2, self.products // columns)
        count = min(self.largest + 1, blocks * columns)
        return Lanczos(blocks - 1, which="algebraic", count=count, floor=self.share * need)


RankName: TypeAlias = Literal["auto"]
RANKS: dict[str, Rank] = {"auto": ByNeed()}
"""The words that stand for rules."""

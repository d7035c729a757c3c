"""What every method of the comparison offers."""

from typing import Protocol

from cao_lab.solvers.objective import Objective
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem


class Method(Protocol):
    """A way to minimise: a frozen dataclass of settings."""

    @property
    def name(self) -> str:
        """What it is called in logs and on the command line."""
        ...

    def minimize(self, objective: Objective) -> str:
        """Minimise until the objective raises; if it cannot go on before that, return why."""
        ...

    def products(self, problem: Problem) -> Products | None:
        """Return one of the products it makes, to be timed, or None if it makes none."""
        ...

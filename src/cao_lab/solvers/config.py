"""What `cao solve` is asked, as plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from cao_lab.runs.settings import ConfigError

MethodName = Literal[
    "sketched-lbfgs", "torch-lbfgs", "scipy-lbfgsb", "scipy-bfgs", "ssbfgs", "ssbroyden", "levenberg-marquardt",
    "target-ratio", "engd-w", "spring", "nncg", "lbfgs-nncg", "soap", "adam",
]  # fmt: skip


class SolveError(ConfigError):
    """A problem that cannot be solved, and what to do about it."""


@dataclass(frozen=True)
class SolveConfig:
    """Minimise a loss of your own, or one of the laboratory's, over its full batch."""

    target: tyro.conf.Positional[str]
    """path.py:function, where function() returns params, a function that returns the loss or residuals, and optionally
    one that returns an error, a number (or None), and draw(n, seed), which returns points for residuals(points) that
    grow in number while they are overfitted. One tensor without dimensions is the loss; anything else, (residual,) or a
    tensor of shape (1,) included, is residuals, and the loss is the sum of their squares. Or a problem of the
    laboratory, such as convection."""
    method: str = "sketched-lbfgs"
    """The method, or several with commas between them, which begin at one start and are drawn in one picture; nncg
    needs the extra peers, soap the extra baselines."""
    evaluations: int = 5_000
    """Evaluations of the loss to spend; a product of the curvature counts by its measured time."""
    seconds: float | None = None
    """Time limit in seconds, for Adam, for measuring what a product costs and for the method together; computing errors
    and writing the log are not counted."""
    adam: int = 0
    """Evaluations of Adam to take first, in addition to the others."""
    adam_lr: float = 1e-3
    """Learning rate of this first phase."""
    records: int = 200
    """Number of lines in the log."""
    out: Path | None = None
    """Folder to write to; out/solve/ and the names of file, function and method if not given. The last result of one
    problem is replaced, and that of another problem is not."""
    threads: int | None = None
    """Threads of torch; torch's own choice if not given."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        names = self.method.split(",")
        for name in names:
            if name not in get_args(MethodName):
                raise SolveError(f"method must be one of {', '.join(get_args(MethodName))}, got {name!r}")
        if len(set(names)) < len(names):
            raise SolveError(f"each method can be named once, got {self.method}")
        for field, least in (("evaluations", 1), ("adam", 0), ("records", 1), ("threads", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise SolveError(f"{field} must be at least {least}, got {value}")
        for field in ("seconds", "adam_lr"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise SolveError(f"{field} must be positive, got {value}")

"""What `cao spectrum` is asked and what it answers, as plain data."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from cao_lab.facts import CurvatureName
from cao_lab.runs.settings import ConfigError

Mode = Literal["train", "eval"]

# What is larger would fill the memory, or never end, before anybody knew why.
BOUNDS = {
    "top": (1, 1000),
    "samples": (1, 10**9),
    "part": (1, 10**9),
    "probes": (1, 10_000),
    "iterations": (2, 10_000),
    "trace_products": (6, 10**6),
    "max_products": (1, 10**6),
    "seed": (0, 2**63 - 1),
    "threads": (1, 1024),
}


class SpectrumError(ConfigError):
    """A spectrum that cannot be taken, and why."""


@dataclass(frozen=True)
class SpectrumConfig:
    """Look at the curvature of a run's model, or of your own: eigenvalues, trace and density."""

    target: tyro.conf.Positional[str]
    """Folder of a run, or path.py:function, where function() returns a model, a loss function of (outputs,
    targets), and batches of (inputs, targets)."""
    top: int = 10
    """Eigenvalues to find at each end of the spectrum."""
    curvature: CurvatureName = "hessian"
    """Which matrix to look at."""
    samples: int = 512
    """Training samples it is taken over."""
    part: int | None = None
    """Samples processed at a time, a batch to batch norm; by default the run's batch size, or your batches."""
    mode: Mode | None = None
    """Mode of the model; by default train for a run, otherwise the mode in which function() left it."""
    by_layer: bool = False
    """Add the share that each parameter tensor has in the top eigenvectors."""
    probes: int = 4
    """Random vectors for the density."""
    iterations: int = 64
    """Products for each of them; the density shows details as fine as the spectrum's range divided by this."""
    trace_products: int = 60
    """Products for the trace."""
    tolerance: float = 1e-3
    """Eigenpairs have converged when their residuals are below this share of the largest eigenvalue's magnitude."""
    max_products: int | None = None
    """Products for the eigenpairs at most; by default 20 for each of --top, and at least 100."""
    seed: int = 0
    """Seed of all random vectors, and of the choice of samples of a run."""
    out: Path | None = None
    """Folder to write to; out/spectrum/ and the target's name if not given."""
    data_dir: Path | None = None
    """Folder with the CIFAR pickles; $CAO_DATA if not given."""
    threads: int | None = None
    """Threads of torch; torch's own choice if not given."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for field, (least, most) in BOUNDS.items():
            value = getattr(self, field)
            if value is not None and not least <= value <= most:
                raise SpectrumError(f"{field} must be from {least} to {most}, got {value}")
        if not 0 < self.tolerance < math.inf:
            raise SpectrumError(f"tolerance must be positive and finite, got {self.tolerance}")


@dataclass(frozen=True)
class Eigenvalue:
    """An eigenvalue λ and the residual ‖Av − λv‖ of its pair."""

    value: float
    residual: float


@dataclass(frozen=True)
class TraceEstimate:
    """A trace and its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Density:
    """The density of eigenvalues on a grid, its standard error, and the width of its smoothing."""

    points: list[float]
    density: list[float]
    standard_error: list[float]
    width: float


@dataclass(frozen=True)
class Layer:
    """A parameter tensor and its share in each of the top eigenvectors: the sum of the squares of its entries."""

    name: str
    size: int
    shares: list[float]


@dataclass(frozen=True)
class Spectrum:
    """A measured spectrum: the content of spectrum.json."""

    target: str
    curvature: str
    mode: str
    samples: int
    parts: int
    parameters: int
    loss: float
    largest: list[Eigenvalue]
    smallest: list[Eigenvalue]
    trace: TraceEstimate
    density: Density
    layers: list[Layer]
    products: int
    seconds: float

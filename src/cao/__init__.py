"""Curvature-aware optimizers for PyTorch: CAO for mini-batches, SketchedLBFGS for full batches."""

from typing import TYPE_CHECKING

from cao.curvature import GaussNewton, Hessian
from cao.eigensolvers import Lanczos, SubspaceIteration
from cao.lbfgs import SketchedLBFGS
from cao.least_squares import LeastSquares
from cao.linalg import Eigenpairs
from cao.line_search import HagerZhang
from cao.metric import AdamMetric
from cao.operators import Mean, SymmetricOperator
from cao.optimizer import CAO
from cao.policies.damping import AtTheEdge, Fixed, FromSpectrum
from cao.policies.rank import ByNeed
from cao.policies.refresh import Every, OnDrift
from cao.preconditioner import Preconditioner, precondition
from cao.sketch import Counters, Sketch
from cao.spectrum import SpectralDensity, Trace, extreme_eigenpairs, spectral_density, top_eigenpairs, trace

__all__ = [
    "CAO",
    "AdamMetric",
    "AtTheEdge",
    "ByNeed",
    "Counters",
    "Eigenpairs",
    "Every",
    "Fixed",
    "FromSpectrum",
    "GaussNewton",
    "HagerZhang",
    "Hessian",
    "Lanczos",
    "LeastSquares",
    "Mean",
    "OnDrift",
    "Preconditioner",
    "Sketch",
    "SketchedLBFGS",
    "SpectralDensity",
    "SubspaceIteration",
    "SymmetricOperator",
    "Trace",
    "extreme_eigenpairs",
    "precondition",
    "spectral_density",
    "top_eigenpairs",
    "trace",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return the version, which is read only when it is asked for: it stands in pyproject.toml alone."""
        if name == "__version__":
            from importlib import metadata  # noqa: PLC0415

            return metadata.version("cao-optimizer")
        raise AttributeError(f"module 'cao' has no attribute {name!r}")

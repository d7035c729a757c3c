"""Curvature-aware optimizers for PyTorch: CAO for mini-batches, SketchedLBFGS for full batches."""

from typing import TYPE_CHECKING

from cao.cao import CAO
from cao.curvature.gauss_newton import GaussNewton
from cao.curvature.hessian import Hessian
from cao.curvature.least_squares import LeastSquares
from cao.curvature.operators import Mean
from cao.fitting.fit import fit
from cao.fitting.progress import Ending, State
from cao.fitting.result import Fit
from cao.growing_points import GrowingPoints
from cao.lbfgs import SketchedLBFGS
from cao.linalg.columns import Eigenpairs
from cao.linalg.eigensolvers import Lanczos, SubspaceIteration, SymmetricOperator
from cao.linalg.spectrum import SpectralDensity, Trace, extreme_eigenpairs, spectral_density, top_eigenpairs, trace
from cao.quasi_newton.line_search import HagerZhang
from cao.readings import Reading
from cao.rules.damping import AtTheEdge, Fixed
from cao.rules.rank import ByNeed
from cao.rules.refresh import Every, OnDrift
from cao.sketch.damped import Damped, precondition
from cao.sketch.sketch import Counters, Sketch
from cao.watch import Sharpness

__all__ = [
    "CAO",
    "AtTheEdge",
    "ByNeed",
    "Counters",
    "Damped",
    "Eigenpairs",
    "Ending",
    "Every",
    "Fit",
    "Fixed",
    "GaussNewton",
    "GrowingPoints",
    "HagerZhang",
    "Hessian",
    "Lanczos",
    "LeastSquares",
    "Mean",
    "OnDrift",
    "Reading",
    "Sharpness",
    "Sketch",
    "SketchedLBFGS",
    "SpectralDensity",
    "State",
    "SubspaceIteration",
    "SymmetricOperator",
    "Trace",
    "extreme_eigenpairs",
    "fit",
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

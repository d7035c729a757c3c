"""CAO: curvature-adaptive optimization for PyTorch by periodic low-rank Hessian sketching."""

from cao.curvature import GaussNewton, Hessian
from cao.eigensolvers import Lanczos, SubspaceIteration
from cao.lbfgs import SketchedLBFGS
from cao.least_squares import LeastSquares
from cao.linalg import Eigenpairs
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

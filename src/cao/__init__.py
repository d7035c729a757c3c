"""CAO: curvature-adaptive optimization for PyTorch by periodic low-rank Hessian sketching."""

from cao.combinations import Mean
from cao.curvature import GaussNewton, Hessian
from cao.lbfgs import SketchedLBFGS
from cao.least_squares import LeastSquares
from cao.linalg import Eigenpairs, SymmetricOperator, lanczos, subspace_iteration
from cao.optimizer import CAO
from cao.preconditioner import precondition
from cao.progress import Counters, Sketch
from cao.spectrum import SpectralDensity, Trace, extreme_eigenpairs, spectral_density, top_eigenpairs, trace

__all__ = [
    "CAO",
    "Counters",
    "Eigenpairs",
    "GaussNewton",
    "Hessian",
    "LeastSquares",
    "Mean",
    "Sketch",
    "SketchedLBFGS",
    "SpectralDensity",
    "SymmetricOperator",
    "Trace",
    "extreme_eigenpairs",
    "lanczos",
    "precondition",
    "spectral_density",
    "subspace_iteration",
    "top_eigenpairs",
    "trace",
]

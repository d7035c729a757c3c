"""CAO: curvature-adaptive optimization for PyTorch by periodic low-rank Hessian sketching."""

from cao.curvature import GaussNewton, Hessian, Mean
from cao.linalg import Eigenpairs, SymmetricOperator, lanczos, subspace_iteration
from cao.optimizer import CAO, Counters, Sketch
from cao.preconditioner import precondition

__all__ = [
    "CAO",
    "Counters",
    "Eigenpairs",
    "GaussNewton",
    "Hessian",
    "Mean",
    "Sketch",
    "SymmetricOperator",
    "lanczos",
    "precondition",
    "subspace_iteration",
]

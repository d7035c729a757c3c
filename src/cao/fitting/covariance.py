"""How well residuals determine parameters: the inverse of JᵀJ, or of its Schur complement for some of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def inverse_gram(jacobian: Float[Tensor, "m n"], chosen: Int[Tensor, " k"]) -> Float[Tensor, "k k"]:
    """Return the block of (JᵀJ)⁻¹ of chosen columns: the inverse of their Schur complement.

    The chosen columns are taken apart from what the others can imitate, by orthogonal factors, so that no square of J
    is formed and the others may be many and dependent. A number that the residuals do not determine beside all others
    has an infinite variance, and its covariances are NaN.
    """
    is_other = torch.ones(jacobian.shape[1], dtype=torch.bool, device=jacobian.device)
    is_other[chosen] = False
    units = lengths_of(jacobian)
    scaled = jacobian / units
    left = without(scaled[:, chosen], scaled[:, is_other])
    _, values, right = torch.linalg.svd(left, full_matrices=False)
    eps = torch.finfo(jacobian.dtype).eps * max(jacobian.shape)
    is_known = values > eps**0.5 * 1e-2 if values.numel() else values > 0
    known = right[is_known]
    covariance = known.T @ (known / values[is_known, None].square())
    free = 1 - known.square().sum(0)
    is_lost = free > 1e-6
    covariance[is_lost], covariance[:, is_lost] = torch.nan, torch.nan
    covariance.diagonal()[is_lost] = torch.inf
    result: Tensor = covariance / units[chosen] / units[chosen][:, None]
    return result


def lengths_of(matrix: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
    """Return the lengths of columns; 1 for one of zeros."""
    lengths = matrix.norm(dim=0)
    return torch.where(lengths > 0, lengths, 1.0)


def without(columns: Float[Tensor, "m k"], others: Float[Tensor, "m n"]) -> Float[Tensor, "m k"]:
    """Return columns without what lies in the range of others."""
    if not others.numel():
        return columns
    left, values, _ = torch.linalg.svd(others, full_matrices=False)
    eps = torch.finfo(others.dtype).eps * max(others.shape)
    basis = left[:, values > eps * values.max()]
    # Twice, because one projection leaves rounding of the size of what was removed.
    for _ in range(2):
        columns = columns - basis @ (basis.T @ columns)
    return columns


def rank_of(jacobian: Float[Tensor, "m n"]) -> int:
    """Return how many directions of the parameters the residuals determine."""
    return int(torch.linalg.matrix_rank(jacobian / lengths_of(jacobian)))

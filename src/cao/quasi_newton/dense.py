"""The inverse Hessian as a dense matrix that scales itself: what is learnt of the curvature, and nothing forgotten."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cao.quasi_newton.pairs import Pairs


class Dense:
    """Self-scaled Broyden updates (Al-Baali 1998; Urbán et al. 2024) of a matrix H, with B its inverse.

    With b = sᵀBs/sᵀy, h = yᵀHy/sᵀy and v = √(yᵀHy)(s/sᵀy − Hy/yᵀHy), a pair of a step s and the gradient's change y
    makes H₊ = (H − Hy(Hy)ᵀ/yᵀHy + φvvᵀ)/τ + ssᵀ/sᵀy, so that H₊y = s. Here φ chooses from Broyden's family, where BFGS
    has one and DFP zero, and τ lets H grow where B is found too large.

    An update takes three passes over P² numbers, and one read from the device.
    """

    name = "dense"
    has_learnt = True

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    @classmethod
    def of(cls, state: dict[str, Any], pairs: Pairs) -> "Dense":
        """Take over from pairs, which are forgotten: they are in the matrix."""
        state["dense"] = pairs.dense()
        pairs.forget()
        for name in ("steps", "changes", "products"):
            del state[name]
        return cls(state)

    @property
    def matrix(self) -> Float[Tensor, "n n"]:
        """H itself."""
        matrix: Tensor = self._state["dense"]
        return matrix

    def __matmul__(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the product with a gradient."""
        return self.matrix @ gradient

    def first_step(self, rate: float, slope: float, decrease: float) -> float:
        """Return the step at which a parabola of this slope has fallen as far as the last one did, but for the rate.

        H has been scaled up, and whole steps are often too long: with them an iteration took 1.6 evaluations, so 1.05.
        """
        return min(rate, -2.02 * decrease / slope) if slope < 0 < decrease else rate

    def learn(self, step: Float[Tensor, " n"], change: Float[Tensor, " n"], image: Float[Tensor, " n"]) -> None:
        """Learn a pair, and B times its step; one of negative curvature teaches nothing."""
        product = self.matrix @ change
        numbers = [step @ change, change @ product, step @ image, step.norm() * change.norm()]
        along, across, bent, largest = torch.stack(numbers).tolist()
        if not (along > torch.finfo(step.dtype).eps * largest and across > 0 and bent > 0):
            return
        share, scale = broyden_coefficients(bent / along, across / along, len(step))
        first = product / math.sqrt(scale * across)
        second = math.sqrt(abs(share) / scale * across) * (step / along - product / across)
        columns = torch.stack([first, second, step / math.sqrt(along)], dim=1)
        signs = columns.new_tensor([-1.0, math.copysign(1.0, share), 1.0])
        # A column and its negative have the same products, so that rounding leaves H exactly symmetric.
        self.matrix.addmm_(columns * signs, columns.T, beta=1 / scale)

    def forget(self) -> None:
        """Leave the state to pairs over the sketch."""
        del self._state["dense"]


class Coefficients(NamedTuple):
    """Which member of Broyden's family an update is, and how it is scaled."""

    share: float
    """φ: one for BFGS, zero for DFP."""
    scale: float
    """τ: what H is divided by."""


def broyden_coefficients(b: float, h: float, size: int) -> Coefficients:
    """Return φ and τ for b = sᵀBs/sᵀy and h = yᵀHy/sᵀy, in so many dimensions, as Al-Baali chooses them.

    bh ≥ 1, by Cauchy and Schwarz; it is one where s and Hy are parallel, and all members of the family are the same.
    """
    a = max(b * h - 1, 1e-15)
    rho = min(1.0, h * (1 - math.sqrt(a / (1 + a))))
    theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
    sigma = 1 + a * theta
    tau, root = min(1.0, 1 / b), sigma ** (-1 / max(size - 1, 1))
    tau = tau * min(root, 1 / theta) if theta > 0 else min(tau * root, sigma)
    return Coefficients((1 - theta) / sigma, tau)

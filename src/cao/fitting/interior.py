"""Bounds for a solver that knows none: other variables, in which the inside of the box is all there is."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cao.curvature.hessian import Hessian
from cao.curvature.least_squares import LeastSquares
from cao.curvature.linearized import ExplicitLinearized, Linearized
from cao.fitting.variables import Variables

# A start on a bound has no slope; it begins this far inside, in units of the parameter or shares of its range.
INSIDE = 1e-2


class Interior:
    """Variables u with x = low + √(u² + 1) − 1 beside one bound, and x = middle + half·sin u between two.

    The slope of x vanishes where a bound holds, and the curvature of x does not: there the loss has a minimum in u,
    with a curvature of the size of its slope in x, so that nothing of the rate at the end is lost (James and Roos,
    1975). Parameters without bounds stay what they are.
    """

    def __init__(self, variables: Variables) -> None:
        self.outer = variables.params
        lows, highs = (side.split(variables.flat.sizes) for side in variables.box)
        self.sides = [
            (low.view(p.shape).to(p), high.view(p.shape).to(p))
            for p, low, high in zip(self.outer, lows, highs, strict=True)
        ]
        self.params = [
            inner_value(p.detach(), *sides).requires_grad_() if is_bounded(*sides) else p
            for p, sides in zip(self.outer, self.sides, strict=True)
        ]
        self.has_bounds = any(is_bounded(*sides) for sides in self.sides)

    @torch.no_grad()
    def enter(self) -> None:
        """Move the parameters to where these variables are."""
        for p, u, sides in zip(self.outer, self.params, self.sides, strict=True):
            if u is not p:
                p.copy_(outer_value(u, *sides).clamp(*sides))

    @torch.no_grad()
    def slopes(self) -> list[Tensor]:
        """Return dx/du of each parameter."""
        return [
            torch.ones_like(p) if u is p else slope(u, *sides)
            for p, u, sides in zip(self.outer, self.params, self.sides, strict=True)
        ]

    def flat_slopes(self) -> Float[Tensor, " n"]:
        """Return them as one vector."""
        return torch.cat([part.reshape(-1) for part in self.slopes()])


def is_bounded(low: Tensor, high: Tensor) -> bool:
    """Whether any entry has a bound."""
    return bool((low.isfinite() | high.isfinite()).any())


def by_sides(u: Tensor, low: Tensor, high: Tensor, *cases: Tensor) -> Tensor:
    """Choose for each entry: between two bounds, above one, below one, or without any."""
    between, above, below = cases
    return torch.where(
        low.isfinite() & high.isfinite(),
        between,
        torch.where(low.isfinite(), above, torch.where(high.isfinite(), below, u)),
    )


def middle_and_half(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return middle and half width, finite where there are none."""
    is_both = low.isfinite() & high.isfinite()
    return torch.where(is_both, low + (high - low) / 2, 0.0), torch.where(is_both, (high - low) / 2, 1.0)


def outer_value(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return x(u)."""
    middle, half = middle_and_half(low, high)
    # u²/(√(u² + 1) + 1) is √(u² + 1) − 1 without cancellation.
    rise = u.square() / (torch.hypot(u, torch.ones_like(u)) + 1)
    return by_sides(u, low, high, middle + half * u.sin(), low + rise, high - rise)


def slope(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return dx/du."""
    _, half = middle_and_half(low, high)
    rise = u / torch.hypot(u, torch.ones_like(u))
    return by_sides(torch.ones_like(u), low, high, half * u.cos(), rise, -rise)


def inner_value(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the u of an x, a little inside."""
    middle, half = middle_and_half(low, high)
    share = ((x - middle) / half).clamp(INSIDE - 1, 1 - INSIDE)
    over, under = (x - low).clamp_min(INSIDE), (high - x).clamp_min(INSIDE)
    return by_sides(x, low, high, share.asin(), (over * (over + 2)).sqrt(), (under * (under + 2)).sqrt())


class InteriorLeastSquares(LeastSquares):
    """The operator 2JᵀJ in these variables."""

    def __init__(self, source: LeastSquares, interior: Interior) -> None:
        self.source, self.interior, self.params = source, interior, interior.params

    @property
    def derivative(self) -> str:  # type: ignore[override]
        """What the last linearization was made of."""
        return self.source.derivative

    def linearize(self) -> Linearized:
        """Return the operator fixed at the present variables."""
        self.interior.enter()
        outer, slopes = self.source.linearize(), self.interior.flat_slopes()
        if not isinstance(outer, ExplicitLinearized):
            return InteriorLinearized(outer, slopes, self.params)
        prices = (outer.per_point, outer.single_columns)
        return ExplicitLinearized(outer.jacobian * slopes, outer.residuals, self.params, *prices)

    def values(self) -> Float[Tensor, " m"]:
        """Return the residuals without their graph."""
        self.interior.enter()
        return self.source.values()

    def residuals(self) -> Float[Tensor, " m"]:
        """Return the residuals."""
        self.interior.enter()
        return self.source.residuals()


class InteriorLinearized(Linearized):
    """The same from products."""

    def __init__(self, outer: Linearized, slopes: Float[Tensor, " n"], params: list[Tensor]) -> None:
        self.outer, self.slopes, self.params, self.residuals = outer, slopes[:, None], params, outer.residuals

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        return self.outer.push(self.slopes * columns)

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        return self.slopes * self.outer.pull(columns)


class InteriorHessian:
    """The part of a loss's Hessian in these variables that comes from its Hessian in the parameters."""

    def __init__(self, loss: Callable[[], Tensor], interior: Interior) -> None:
        self.hessian, self.interior, self.params = Hessian(loss, interior.outer), interior, interior.params

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column."""
        self.interior.enter()
        slopes = self.interior.flat_slopes()[:, None]
        return slopes * (self.hessian @ (slopes * columns))

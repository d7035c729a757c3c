"""The spectrum of a symmetric operator: its ends, its trace and its density, each with a measure of its own error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cao.curvature.operators import ParameterOperator, linearized
from cao.linalg.columns import HERE, Eigenpairs, Which, inner_products, orthonormalize, small_eigh
from cao.linalg.eigensolvers import KrylovSpace, Lanczos, SymmetricOperator
from cao.linalg.flat import FlatParams, check_whole

Quadrature = tuple[Float[Tensor, " m"], Float[Tensor, " m"]]
"""Nodes and weights, the nodes ascending."""


@dataclass(frozen=True)
class SpectralDensity:
    """The density of eigenvalues on a grid, smoothed by a Gaussian, and the quadrature it was made from."""

    points: Float[Tensor, " m"]
    density: Float[Tensor, " m"]
    """Mean over the probes; its integral is 1."""
    standard_error: Float[Tensor, " m"]
    """Of that mean, from the scatter of the probes; NaN if there is only one."""
    width: float
    """Standard deviation of the Gaussian."""
    nodes: tuple[Float[Tensor, " i"], ...]
    """For each probe the Ritz values, …"""
    weights: tuple[Float[Tensor, " i"], ...]
    """… and the share of all eigenvalues that each of them stands for."""
    products: int


@dataclass(frozen=True)
class Trace:
    """An unbiased estimate of a trace, its standard error, and the number of products it cost."""

    value: float
    standard_error: float
    products: int


def top_eigenpairs(
    operator: SymmetricOperator,
    k: int = 1,
    tolerance: float = 1e-3,
    *,
    which: Which = "algebraic",
    max_products: int | None = None,
    size: int | None = None,
    seed: int = 0,
) -> Eigenpairs:
    """Find the k eigenpairs of largest value, or of largest magnitude, by Lanczos with restarts.

    It ends when every residual ‖Av − λv‖ is below tolerance·|λ|, or after max(100, 20k) products; the residuals show
    which. Memory holds at most max(40, 3k) columns besides the result. Copies of a multiple eigenvalue may be missed.
    """
    columns = columns_of(operator, size)
    checked_count(k, columns.size, max_products)
    return restarted(k, tolerance, which, max_products or max(100, 20 * k))(
        linearized(operator), columns.random(1, columns.generator(seed))
    )


def restarted(count: int, tolerance: float, which: Which, max_products: int) -> Lanczos:
    """Return a Lanczos method of bounded memory that ends when its pairs have converged or its products are spent."""
    return Lanczos(max_products - 1, tolerance, which, count, capacity=max(40, 3 * count))


def extreme_eigenpairs(
    operator: SymmetricOperator,
    k: int = 1,
    tolerance: float = 1e-3,
    *,
    max_products: int | None = None,
    size: int | None = None,
    seed: int = 0,
) -> tuple[Eigenpairs, Eigenpairs]:
    """Find the k largest eigenpairs and the k smallest, both from one Krylov space, as `top_eigenpairs` does.

    The smallest may be zero, as for a Gauss-Newton matrix, so residuals are held against the largest magnitude.
    Each of the two results carries the number of products that both together cost.
    """
    columns = columns_of(operator, size)
    count = min(2 * k, columns.size)
    checked_count(k, columns.size, max_products, needed=count)
    solve = restarted(count, tolerance, "both-ends", max_products or max(100, 20 * k))
    pairs = solve(linearized(operator), columns.random(1, columns.generator(seed)))
    descending = pairs.values.argsort(descending=True)
    return selected(pairs, descending[:k]), selected(pairs, descending.flip(0)[:k])


def trace(operator: SymmetricOperator, *, products: int = 60, size: int | None = None, seed: int = 0) -> Trace:
    """Estimate the trace by Hutch++ (Meyer, Musco, Musco and Woodruff 2021).

    A third of the products finds a basis Q of the dominant directions, a third takes the trace within it, tr(QᵀAQ),
    exactly, and a third probes the rest, (I − QQᵀ)A(I − QQᵀ), by random signs, whose scatter gives the standard error.
    The trace of an operator with no more rows than a third of the products is exact. Memory holds about three blocks of
    n × products/3.
    """
    if products < 6:
        raise ValueError(f"products must be at least 6, got {products}")
    columns = columns_of(operator, size)
    generator = columns.generator(seed)
    operator, width = linearized(operator), min(products // 3, columns.size)
    basis = orthonormalize((operator @ columns.random(width, generator)).detach().clone())
    within = float(inner_products(basis, (operator @ basis).detach()).trace())
    if width == columns.size:
        return Trace(within, 0.0, 2 * width)
    probes = columns.random(width, generator).sign()
    probes -= basis @ (basis.T @ probes)
    samples = inner_products(probes, (operator @ probes).detach()).diagonal()
    return Trace(within + float(samples.mean()), float(samples.std()) / math.sqrt(width), 3 * width)


def spectral_density(
    operator: SymmetricOperator,
    *,
    probes: int = 4,
    iterations: int = 64,
    width: float | None = None,
    points: int = 1000,
    size: int | None = None,
    seed: int = 0,
) -> SpectralDensity:
    """Estimate the density of the eigenvalues by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017).

    From each probe, a random vector, Lanczos with full reorthogonalisation makes a Gauss quadrature of the density:
    exact for polynomials up to degree 2·iterations − 1, blind to anything much finer than the gaps between its
    nodes, which decide the default width of the smoothing. The scatter of the probes shows the error of sampling, which
    falls with the operator's size, but not that of the smoothing.

    It costs probes·iterations products, and memory for iterations + 2 columns.
    """
    if min(probes, iterations) < 1 or points < 2 or (width is not None and width <= 0):
        raise ValueError(
            "probes, iterations and width must be positive and points at least 2, "
            f"got {probes}, {iterations}, {width} and {points}"
        )
    columns = columns_of(operator, size)
    operator, generator = linearized(operator), columns.generator(seed)
    quadratures = [lanczos_quadrature(operator, columns.random(1, generator), iterations) for _ in range(probes)]
    nodes, weights = zip(*quadratures, strict=True)
    lowest, highest = float(torch.cat(nodes).min()), float(torch.cat(nodes).max())
    # All eigenvalues may be the same, as those of the identity.
    spread = (highest - lowest) or 1e-3 * (abs(highest) or 1.0)
    width = width or resolution(quadratures, spread)
    grid = torch.linspace(lowest - 4 * width, highest + 4 * width, points, dtype=torch.float64, device=nodes[0].device)
    curves = torch.stack([smoothed(*quadrature, grid, width) for quadrature in quadratures])
    error = curves.std(dim=0) / math.sqrt(probes) if probes > 1 else torch.full_like(grid, torch.nan)
    return SpectralDensity(grid, curves.mean(dim=0), error, width, nodes, weights, sum(map(len, nodes)))


def lanczos_quadrature(operator: SymmetricOperator, start: Float[Tensor, "n 1"], iterations: int) -> Quadrature:
    """Return nodes and weights of the Gauss quadrature of uᵀ f(A) u for the unit vector u along `start`."""
    space = KrylovSpace(operator, start, min(iterations, len(start)))
    space.grow()
    # In an invariant space the quadrature is exact, and there is nothing to grow into.
    while len(space.projected) < min(iterations, len(start)) and not space.is_invariant:
        space.grow()
    nodes, rotation = small_eigh(space.projected, "algebraic")
    return nodes.flip(0), rotation[0].square().flip(0)


def resolution(quadratures: Sequence[Quadrature], spread: float) -> float:
    """Return the default width: three quarters of the mean gap between nodes, weighted as the nodes are.

    Wherever most eigenvalues are, neighbouring Gaussians then melt into one; with evenly spaced nodes their sum ripples
    by less than 0.1 %. For a semicircle it is the range divided by the number of nodes; where a bulk is narrow and
    outliers are far, as in a Hessian, the nodes crowd in the bulk and the width is smaller.
    """
    gaps = [float(nodes.diff() @ (weights[1:] + weights[:-1]) / 2) for nodes, weights in quadratures]
    width = 0.75 * sum(gaps) / len(gaps)
    # Without a floor, a matrix of low rank would have no width at all.
    return max(width, spread / 400)


def smoothed(
    nodes: Float[Tensor, " i"], weights: Float[Tensor, " i"], points: Float[Tensor, " m"], width: float
) -> Float[Tensor, " m"]:
    """Return the sum of a Gaussian for each node, of its weight and of the given width, at the points."""
    kernel = torch.exp(-(((points[:, None] - nodes) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    return kernel @ weights


def selected(pairs: Eigenpairs, chosen: Tensor) -> Eigenpairs:
    """Return some of the pairs, each vector contiguous in memory."""
    return Eigenpairs(pairs.values[chosen], pairs.vectors.T[chosen].T, pairs.residuals[chosen], pairs.products)


class Columns(NamedTuple):
    """The columns that an operator multiplies."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def generator(self, seed: int) -> torch.Generator:
        """Return a random stream of its own, on the device of the columns."""
        return torch.Generator(self.device).manual_seed(seed)

    def random(self, count: int, generator: torch.Generator) -> Float[Tensor, "n k"]:
        """Draw standard normal columns."""
        return HERE.random(self.size, count, generator, self.dtype)


def columns_of(operator: SymmetricOperator, size: int | None) -> Columns:
    """Read the columns' size from an operator's parameters or a matrix's shape, or else take the one given.

    Columns are float64 for float64 parameters and otherwise float32; for an operator that says nothing of itself they
    have torch's default type and device.
    """
    if isinstance(operator, ParameterOperator):
        check_whole(operator.params, "the spectrum of an operator", "a model on one device, loaded from a checkpoint")
        flat = FlatParams(operator.params)
        columns = Columns(flat.size, flat.dtype, flat.device)
    elif isinstance(operator, Tensor):
        columns = Columns(operator.shape[0], operator.dtype, operator.device)
    elif size is not None:
        return Columns(size, torch.get_default_dtype(), torch.get_default_device())
    else:
        raise ValueError(f"{type(operator).__name__} has no params to read its size from; pass size=")
    if size not in (None, columns.size):
        raise ValueError(f"the operator has {columns.size} rows, got size={size}; leave it out")
    return columns


def checked_count(k: int, size: int, max_products: int | None, needed: int | None = None) -> None:
    """Refuse a number of eigenpairs that the operator does not have, or that so few products cannot give."""
    if not 1 <= k <= size:
        raise ValueError(f"k must be from 1 to the operator's {size} rows, got {k}")
    if max_products is not None and max_products < (needed or k):
        raise ValueError(f"max_products must be at least {needed or k} for k = {k}, got {max_products}")

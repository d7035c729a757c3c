"""Objectives whose curvature constants are known in closed form, and one small network."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import Eigenpairs


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def normal(source: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def uniform(source: torch.Generator, low: float, high: float) -> float:
    """Draw one number between low and high."""
    return low + (high - low) * float(torch.rand((), generator=source, dtype=torch.float64))


def integer(source: torch.Generator, low: int, high: int) -> int:
    """Draw one integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=source))


def orthonormal(source: torch.Generator, n: int, k: int) -> Float[Tensor, "n k"]:
    """Draw k orthonormal columns."""
    basis: Tensor = torch.linalg.qr(normal(source, n, k)).Q
    return basis


def eigenpairs(matrix: Float[Tensor, "n n"], rank: int, *, which: str = "magnitude") -> Eigenpairs:
    """Return the exact pairs of largest magnitude (or largest value) of a dense symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    order = (values.abs() if which == "magnitude" else values).argsort(descending=True)[:rank]
    return Eigenpairs(values[order], vectors[:, order], torch.zeros(len(order), dtype=matrix.dtype))


def dense_preconditioner(
    values: Float[Tensor, " k"], vectors: Float[Tensor, "n k"], damping: float
) -> Float[Tensor, "n n"]:
    """Return (B + ηI)⁻¹ of B = V diag(λ) Vᵀ by a dense inverse."""
    identity = torch.eye(vectors.shape[0], dtype=vectors.dtype)
    inverse: Tensor = torch.linalg.inv((vectors * values) @ vectors.T + damping * identity)
    return inverse


@dataclass(frozen=True)
class Quadratic:
    """½ θᵀHθ, whose Hessian has a prescribed spectrum."""

    hessian: Float[Tensor, "n n"]

    @staticmethod
    def with_spectrum(values: Float[Tensor, " n"], source: torch.Generator) -> "Quadratic":
        """Return a quadratic with these curvatures along random orthonormal directions."""
        vectors = orthonormal(source, len(values), len(values))
        return Quadratic((vectors * values) @ vectors.T)

    def value(self, point: Float[Tensor, " n"]) -> float:
        """Return f(θ)."""
        return float(point @ self.hessian @ point) / 2

    def gradient(self, point: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return ∇f(θ)."""
        return self.hessian @ point


@dataclass(frozen=True)
class CosineMixture:
    """Σ aⱼ cos(wⱼ·θ + bⱼ): smooth, bounded and not convex.

    Its Hessian −Σ aⱼ cos(·) wⱼwⱼᵀ lies between ∓Σ |aⱼ| wⱼwⱼᵀ, whose largest eigenvalue is L; in the same way
    λmax(Σ |aⱼ| ‖wⱼ‖ wⱼwⱼᵀ) is a Lipschitz constant of the Hessian.
    """

    amplitudes: Float[Tensor, " m"]
    frequencies: Float[Tensor, "m n"]
    phases: Float[Tensor, " m"]

    @staticmethod
    def random(n: int, terms: int, source: torch.Generator) -> "CosineMixture":
        """Draw a mixture."""
        return CosineMixture(normal(source, terms), normal(source, terms, n), 3 * normal(source, terms))

    @cached_property
    def smoothness(self) -> float:
        """A Lipschitz constant L of the gradient."""
        return largest_eigenvalue((self.frequencies.T * self.amplitudes.abs()) @ self.frequencies)

    @cached_property
    def hessian_smoothness(self) -> float:
        """A Lipschitz constant of the Hessian."""
        weights = self.amplitudes.abs() * self.frequencies.norm(dim=1)
        return largest_eigenvalue((self.frequencies.T * weights) @ self.frequencies)

    @property
    def minimum(self) -> float:
        """A lower bound of f."""
        return -float(self.amplitudes.abs().sum())

    def angles(self, point: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
        """Return the arguments of the cosines."""
        return self.frequencies @ point + self.phases

    def value(self, point: Float[Tensor, " n"]) -> float:
        """Return f(θ)."""
        return float(self.amplitudes @ self.angles(point).cos())

    def gradient(self, point: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return ∇f(θ)."""
        return -self.frequencies.T @ (self.amplitudes * self.angles(point).sin())

    def hessian(self, point: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
        """Return ∇²f(θ)."""
        return -(self.frequencies.T * (self.amplitudes * self.angles(point).cos())) @ self.frequencies


@dataclass(frozen=True)
class WavyLeastSquares:
    """Σ h(zⱼ) of z = Aθ with h(z) = z² + 3 sin²z, where A has more columns than rows.

    It has a subspace of minimisers and regions of negative curvature, is 8σ_max(A)²-smooth, and satisfies the PL
    inequality with μ = σ_min(A)²/11 (proved in docs/theory.md).
    """

    matrix: Float[Tensor, "m n"]

    @cached_property
    def smoothness(self) -> float:
        """The Lipschitz constant L of the gradient."""
        return 8 * float(torch.linalg.svdvals(self.matrix)[0]) ** 2

    @cached_property
    def pl(self) -> float:
        """A constant μ of the PL inequality."""
        return float(torch.linalg.svdvals(self.matrix)[-1]) ** 2 / 11

    def value(self, point: Float[Tensor, " n"]) -> float:
        """Return f(θ), whose minimum is 0."""
        outputs = self.matrix @ point
        return float((outputs.square() + 3 * outputs.sin().square()).sum())

    def gradient(self, point: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return ∇f(θ)."""
        outputs = self.matrix @ point
        return self.matrix.T @ (2 * outputs + 3 * (2 * outputs).sin())

    def hessian(self, point: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
        """Return ∇²f(θ)."""
        outputs = self.matrix @ point
        return (self.matrix.T * (2 + 6 * (2 * outputs).cos())) @ self.matrix


def largest_eigenvalue(matrix: Float[Tensor, "n n"]) -> float:
    """Return the largest eigenvalue of a symmetric matrix."""
    return float(torch.linalg.eigvalsh(matrix)[-1])


def random_mixtures(count: int, seed: int) -> Iterator[tuple[CosineMixture, torch.Generator]]:
    """Yield random cosine mixtures of 2 to 12 dimensions, each with the generator that drew it."""
    source = generator(seed)
    for _ in range(count):
        yield CosineMixture.random(integer(source, 2, 12), integer(source, 1, 20), source), source


def random_spectra(seed: int) -> Iterator[tuple[Float[Tensor, " n"], float, torch.Generator]]:
    """Yield descending positive spectra over three decades, and dampings over four."""
    source = generator(seed)
    for _ in range(200):
        n = integer(source, 2, 12)
        spectrum = 10 ** (3 * torch.rand(n, generator=source, dtype=torch.float64) - 1)
        yield spectrum.sort(descending=True).values, 10 ** uniform(source, -3, 1), source

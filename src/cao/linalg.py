"""Linear algebra on tall blocks of columns: orthonormal bases, inner products, Ritz pairs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Which = Literal["magnitude", "algebraic", "both-ends"]
"""The eigenvalues wanted: of largest magnitude, the largest, or the largest and the smallest in turn."""


class Rows:
    """Where the rows of columns are: here in this process, all of them. Elsewhere they may be spread over several."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of what each process has added up over its rows."""
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean of the numbers that each process has."""
        return numbers

    def length(self, norms: Tensor) -> Tensor:
        """Return the lengths of columns of which each process knows the norm of its part."""
        return norms

    def scale(self, param: Tensor) -> float:
        """Return the factor of a parameter's entries in columns."""
        return 1.0

    def count(self, columns: Float[Tensor, "n k"]) -> int:
        """Return how many rows there are in all processes."""
        return columns.shape[0]

    def random(self, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> Float[Tensor, "n k"]:
        """Draw standard normal columns, each contiguous in memory, on the generator's device."""
        return torch.randn(columns, rows, generator=generator, device=generator.device, dtype=dtype).T

    def basis(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return an orthonormal basis by Householder's reflections, which bear any columns."""
        basis: Tensor = torch.linalg.qr(columns).Q
        return basis


ROWS: ContextVar[Rows] = ContextVar("ROWS", default=Rows())  # noqa: B039
"""The rows that the linear algebra of this moment is about."""

# Blocks of this many numbers keep the temporaries of a pass over an n × k matrix small and in cache.
NUMBERS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Eigenpairs:
    """Approximate eigenpairs, their residuals ‖Av − λv‖, and the number of products they cost."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float[Tensor, " k"]
    products: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether every value and every vector is finite."""
        # A sum is non-finite if any of its terms is, and needs no n × k temporary.
        return bool(total(self.values.sum() + self.residuals.sum() + self.vectors.sum()).isfinite())


@contextmanager
def over(rows: Rows) -> Iterator[None]:
    """Let inner products and norms run over these rows, wherever they are."""
    token = ROWS.set(rows)
    try:
        yield
    finally:
        ROWS.reset(token)


def total(numbers: Tensor) -> Tensor:
    """Return the sum of what each process that holds rows has added up."""
    return ROWS.get().total(numbers)


def norms(columns: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """Return the columns' lengths."""
    return ROWS.get().length(columns.norm(dim=0))


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32, even where the user lets them be multiplied in TF32 or bfloat16.

    That is right for a network, but would leave an orthonormal basis three digits. So autocast is off here, and torch
    (2.9 and later) is asked for all digits.
    """
    known = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    backends: list[Any] = [backend for backend in known if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def generator_for(device: torch.device, *numbers: int) -> torch.Generator:
    """Return a random stream that depends on all the numbers, and on nothing else: no interpreter, no global stream."""
    # Four bytes, because torch's generator on a CPU looks at the lower 32 bits of a seed only.
    digest = sha256(repr(numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))


def random_columns(
    rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n k"]:
    """Draw standard normal columns, each contiguous in memory, on the generator's device."""
    return ROWS.get().random(rows, columns, generator, dtype)


@full_precision()
def rayleigh_ritz(
    basis: Float[Tensor, "n k"], image: Float[Tensor, "n k"], which: Which = "magnitude"
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"], Float[Tensor, " k"]]:
    """Return Ritz values, the rotation from the basis to the Ritz vectors, and the residuals, the most wanted first."""
    values, rotation = small_eigh(inner_products(basis, image), which)
    squares = torch.zeros_like(values)
    turn = rotation.T.to(basis.dtype)
    scaled = values.to(basis.dtype).unsqueeze(1) * turn
    for piece, image_piece in row_pieces(basis, image):
        residual = torch.addmm(turn @ image_piece, scaled, piece, alpha=-1)
        squares += residual.square_().sum(dim=1)
    return values.to(basis.dtype), rotation.to(basis.dtype), total(squares).sqrt().to(basis.dtype)


def small_eigh(matrix: Float[Tensor, "k k"], which: Which) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Decompose a small symmetric matrix in float64, the most wanted value first; NaN values where that fails."""
    # Round-off leaves the matrix slightly asymmetric, and eigh reads one triangle only.
    symmetric = (matrix + matrix.T).double() / 2
    try:
        values, rotation = torch.linalg.eigh(symmetric)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.full_like(symmetric[0], torch.nan), torch.eye(len(symmetric)).to(symmetric)
    order = (values.abs() if which == "magnitude" else values).argsort(descending=True)
    if which == "both-ends":
        order = torch.stack([order, order.flip(0)], dim=1).flatten()[: len(values)]
    return values[order], rotation[:, order]


def has_converged(
    values: Float[Tensor, " k"], residuals: Float[Tensor, " k"], tolerance: float | None, which: Which
) -> bool:
    """Whether every residual is below the tolerance relative to its value, or is rounding of the largest.

    At both ends the smallest value may be zero, so there residuals are held against the largest magnitude.
    """
    if tolerance is None:
        return False
    magnitudes = values.abs()
    largest = magnitudes.max()
    bounds = tolerance * (largest if which == "both-ends" else magnitudes)
    return bool((residuals <= bounds.clamp_min(10 * torch.finfo(residuals.dtype).eps * largest)).all())


def orthonormalize(columns: Float[Tensor, "n k"], *, is_rough: bool = False) -> Float[Tensor, "n k"]:
    """Return an orthonormal basis whose span contains the columns, overwriting them where it can.

    Cholesky-QR moves each number a few times and makes no copy; Householder QR serves columns that are nearly
    dependent, zero or non-finite. A rough basis, good enough between two power iterations, is orthonormal to 1e-3 or
    better and costs half.
    """
    # The first pass loses about ε·κ of orthogonality for columns of condition κ (κ² for the float64 sums, in float64
    # too), and the second mends what is below 1.
    threshold = max(torch.finfo(columns.dtype).eps ** (2 / 3), 1e-7)
    for dtype in (torch.float64, columns.dtype):  # By the second pass, sums in the columns' own precision will do.
        gram = inner_products(columns, columns, dtype)
        lengths = gram.diagonal().sqrt()
        factor = torch.linalg.cholesky_ex(gram / lengths / lengths[:, None]).L
        # The comparison is also false for NaN, which a failed factorisation may leave behind.
        if not bool(factor.diagonal().min() > threshold):
            return column_major(ROWS.get().basis(columns))
        inverse = torch.linalg.solve_triangular(factor.T, torch.diag(1 / lengths).T, upper=True, left=False)
        multiply_in_place(columns, inverse)
        if is_rough and bool(factor.diagonal().min() > 1e-3):
            break
    return columns


@full_precision()
def inner_products(
    left: Float[Tensor, "n j"], right: Float[Tensor, "n k"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "j k"]:
    """Return leftᵀ right in float64, each block of rows multiplied in the given precision."""
    products = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for piece, other in row_pieces(left, right):
        piece = piece.to(dtype)
        products += piece @ (piece if left is right else other.to(dtype)).T
    return total(products)


@full_precision()
def multiply_in_place(columns: Float[Tensor, "n k"], matrix: Float[Tensor, "k k"]) -> Float[Tensor, "n k"]:
    """Overwrite the columns by columns @ matrix, a block of rows at a time."""
    transposed = matrix.T.to(columns.dtype)
    for (piece,) in row_pieces(columns):
        piece.copy_(transposed @ piece)
    return columns


def row_pieces(*blocks: Float[Tensor, "n _"]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all blocks, transposed: each column is contiguous in memory, and multiplies best so."""
    rows = max(1, NUMBERS_AT_ONCE // max(block.shape[1] for block in blocks))
    yield from zip(*(block.T.split(rows, dim=1) for block in blocks), strict=True)


def column_major(columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return a copy in which each column is contiguous, as a flat parameter vector should be."""
    return columns.T.clone(memory_format=torch.contiguous_format).T

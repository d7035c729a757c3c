"""Tall blocks of columns: the space they lie in, orthonormal bases, inner products, Ritz pairs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from cao.threads import process_wide

WITHOUT_FLOAT64 = {"mps"}
"""Devices that have no float64."""


def precise(device: torch.device) -> torch.dtype:
    """Return the most precise type that a device can add up in."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def in_float64(small: Tensor) -> Tensor:
    """Return a few numbers in float64, on the CPU: some devices have none, and all are slow with small matrices."""
    return small.cpu().double()


class Space:
    """A space of columns, all of whose rows are in this process; those of another may be spread over several."""

    mesh: Any = None
    """The processes that rows are spread over, if they are."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of what each process has added up over its rows."""
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean of the numbers that each process has."""
        return numbers

    def length(self, norms: Tensor) -> Tensor:
        """Return the lengths of columns of which each process knows the norm of its part."""
        return norms

    def norms(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """Return the columns' lengths."""
        return self.length(columns.norm(dim=0))

    def scale(self, param: Tensor) -> float:
        """Return the factor of a parameter's entries in columns."""
        return 1.0

    def count(self, columns: Float[Tensor, "n k"]) -> int:
        """Return how many rows there are in all processes."""
        return columns.shape[0]

    def random(
        self, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n k"]:
        """Draw standard normal columns, each contiguous in memory, on the generator's device."""
        return torch.randn(columns, rows, generator=generator, device=generator.device, dtype=dtype).T

    def basis(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return an orthonormal basis by Householder's reflections, which bear any columns."""
        # Where there is no float64, there may be no QR either.
        basis: Tensor = torch.linalg.qr(columns.cpu() if columns.device.type in WITHOUT_FLOAT64 else columns).Q
        return basis.to(columns)


HERE = Space()
"""The space of one process."""


def generator_for(device: torch.device, *numbers: int) -> torch.Generator:
    """Return a random stream that depends on all the numbers, and on nothing else: no interpreter, no global stream."""
    # Four bytes, because torch's generator on a CPU looks at the lower 32 bits of a seed only.
    digest = sha256(repr(numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))


Which = Literal["magnitude", "algebraic", "both-ends"]
"""The eigenvalues wanted: of largest magnitude, the largest, or the largest and the smallest in turn."""


def check_which(which: str) -> None:
    """Refuse a word that stands for no eigenvalues."""
    if which not in get_args(Which):
        raise ValueError(f"which must be one of {', '.join(get_args(Which))}, got {which!r}")


# Blocks of this many numbers keep the temporaries of a pass over an n × k matrix small and in cache.
NUMBERS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Eigenpairs:
    """Approximate eigenpairs, their residuals ‖Av − λv‖, and the number of products they cost."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float[Tensor, " k"]
    products: int = 0

    def is_finite(self, space: Space = HERE) -> bool:
        """Whether every value and every vector is finite."""
        # A sum is non-finite if any of its terms is, and needs no n × k temporary.
        return bool(space.total(self.values.sum() + self.residuals.sum() + self.vectors.sum()).isfinite())


@process_wide
@contextmanager
def all_digits() -> Iterator[None]:
    """Let torch (2.9 and later) multiply float32 matrices in float32."""
    known = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    backends: list[Any] = [backend for backend in known if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32, even where the user lets them be multiplied in TF32 or bfloat16.

    That is right for a network, but would leave an orthonormal basis three digits.
    """
    with all_digits(), ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@full_precision()
def rayleigh_ritz(
    basis: Float[Tensor, "n k"], image: Float[Tensor, "n k"], which: Which = "magnitude", space: Space = HERE
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"], Float[Tensor, " k"]]:
    """Return Ritz values, the rotation from the basis to the Ritz vectors, and the residuals, the most wanted first."""
    values, rotation = small_eigh(inner_products(basis, image, space=space), which)
    values, rotation = values.to(basis), rotation.to(basis)
    squares = torch.zeros(len(values), dtype=precise(basis.device), device=basis.device)
    turn = rotation.T
    scaled = values.unsqueeze(1) * turn
    for piece, image_piece in row_pieces(basis, image):
        residual = torch.addmm(turn @ image_piece, scaled, piece, alpha=-1)
        squares += residual.square_().sum(dim=1)
    return values, rotation, space.total(squares).sqrt().to(basis.dtype)


def small_eigh(matrix: Float[Tensor, "k k"], which: Which) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Decompose a small symmetric matrix in float64, the most wanted value first; NaN values where that fails."""
    # Round-off leaves the matrix slightly asymmetric, and eigh reads one triangle only.
    symmetric = in_float64(matrix + matrix.T) / 2
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


def orthonormalize(
    columns: Float[Tensor, "n k"], *, is_rough: bool = False, space: Space = HERE
) -> Float[Tensor, "n k"]:
    """Return an orthonormal basis whose span contains the columns, overwriting them where it can.

    Cholesky-QR moves each number a few times and makes no copy; Householder QR serves columns that are nearly
    dependent, zero or non-finite. A rough basis, good enough between two power iterations, is orthonormal to 1e-3 or
    better and costs half.
    """
    # The first pass loses about ε·κ of orthogonality for columns of condition κ, and κ² for the ε of its sums, and the
    # second mends what is below 1.
    sums = precise(columns.device)
    threshold = max(torch.finfo(columns.dtype).eps ** (2 / 3), 7 * torch.finfo(sums).eps ** 0.5)
    for dtype in (sums, columns.dtype):  # By the second pass, sums in the columns' own precision will do.
        gram = inner_products(columns, columns, dtype, space)
        lengths = gram.diagonal().sqrt()
        factor = torch.linalg.cholesky_ex(gram / lengths / lengths[:, None]).L
        # The comparison is also false for NaN, which a failed factorisation may leave behind.
        if not bool(factor.diagonal().min() > threshold):
            return column_major(space.basis(columns))
        inverse = torch.linalg.solve_triangular(factor.T, torch.diag(1 / lengths).T, upper=True, left=False)
        multiply_in_place(columns, inverse)
        if is_rough and bool(factor.diagonal().min() > 1e-3):
            break
    return columns


@full_precision()
def inner_products(
    left: Float[Tensor, "n j"],
    right: Float[Tensor, "n k"],
    dtype: torch.dtype | None = None,
    space: Space = HERE,
) -> Float[Tensor, "j k"]:
    """Return leftᵀ right in float64, each block of rows multiplied in the given precision, by default the best."""
    sums = precise(left.device)
    products = torch.zeros(left.shape[1], right.shape[1], dtype=sums, device=left.device)
    for piece, other in row_pieces(left, right):
        piece = piece.to(dtype or sums)
        products += piece @ (piece if left is right else other.to(dtype or sums)).T
    return in_float64(space.total(products))


@full_precision()
def multiply_in_place(columns: Float[Tensor, "n k"], matrix: Float[Tensor, "k k"]) -> Float[Tensor, "n k"]:
    """Overwrite the columns by columns @ matrix, a block of rows at a time."""
    transposed = matrix.T.to(columns)
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

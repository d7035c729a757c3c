"""Eigenpairs of a symmetric operator that is known only through its products with blocks of columns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Which = Literal["magnitude", "algebraic"]

# Blocks of this many numbers keep the temporaries of a pass over an n × k matrix small and in cache.
NUMBERS_AT_ONCE = 1 << 17


@runtime_checkable
class SymmetricOperator(Protocol):
    """Anything that multiplies a block of columns: a dense matrix, a Hessian, a Gauss-Newton matrix."""

    def __matmul__(self, columns: Tensor, /) -> Tensor:
        """Return the operator's product with each column."""
        ...


def product(operator: SymmetricOperator, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return the operator's product, without the graph that a user's own operator may leave on it."""
    return (operator @ columns).detach()


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
        return bool((self.values.sum() + self.residuals.sum() + self.vectors.sum()).isfinite())


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32, even where the user lets them be multiplied in TF32 or bfloat16.

    That is right for a network, but would leave an orthonormal basis three digits. (torch before 2.9 cannot be asked.)
    """
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


def random_columns(
    rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n k"]:
    """Draw standard normal columns, each contiguous in memory, on the generator's device."""
    return torch.randn(columns, rows, generator=generator, device=generator.device, dtype=dtype).T


def subspace_iteration(
    operator: SymmetricOperator,
    start: Float[Tensor, "n k"],
    iterations: int,
    *,
    tolerance: float | None = None,
    which: Which = "magnitude",
    overwrite_start: bool = False,
) -> Eigenpairs:
    """Approximate k extreme eigenpairs by orthogonal iteration and Rayleigh-Ritz (the paper's Algorithm 2).

    Each iteration costs k products and the Rayleigh-Ritz step k more; a tolerance on the relative residuals may end it
    sooner. For the largest algebraic values the operator is shifted by the most negative Ritz value seen, so that
    whatever has the largest magnitude after the shift is the largest before it. Overwriting the start columns saves a
    copy of them.
    """
    width = start.shape[1]
    is_measured = [tolerance is not None or which == "algebraic"] * iterations + [True]
    basis = orthonormalize(start if overwrite_start else column_major(start), is_rough=not is_measured[0])
    # Two n × k blocks are alive at any time (but for the shift): no name may hold on to an old one.
    del start
    shift = 0.0
    for iteration in range(iterations + 1):
        image = product(operator, basis)
        if is_measured[iteration]:
            values, rotation, residuals = rayleigh_ritz(basis, image, which)
            if iteration == iterations or (tolerance is not None and has_converged(values, residuals, tolerance)):
                break
            if which == "algebraic":
                shift = max(shift, -float(values.min()))
                image = image + shift * basis
        del basis
        basis = orthonormalize(image, is_rough=not is_measured[iteration + 1])
    del image
    return Eigenpairs(values, multiply_in_place(basis, rotation), residuals, (iteration + 1) * width)


def lanczos(
    operator: SymmetricOperator,
    start: Float[Tensor, "n b"],
    iterations: int,
    *,
    count: int | None = None,
    tolerance: float | None = None,
    which: Which = "magnitude",
    overwrite_start: bool = False,
) -> Eigenpairs:
    """Approximate `count` extreme eigenpairs (by default b) by block Lanczos with full reorthogonalisation.

    The basis of b·(iterations + 1) columns stays in memory, and each of them costs one product.
    """
    count = start.shape[1] if count is None else count
    blocks = [orthonormalize(start if overwrite_start else column_major(start))]
    projected = torch.zeros(0, 0, dtype=torch.float64, device=start.device)
    for iteration in range(iterations + 1):
        image = column_major(product(operator, blocks[-1]))
        projected = bordered(projected, remove_components(image, blocks))
        values, rotation = small_eigh(projected)
        wanted = order_of(values, which)[:count]
        values, rotation = values[wanted].to(start.dtype), rotation[:, wanted].to(start.dtype)
        # The residual of a Ritz vector is what the newest block's image has outside the basis.
        residuals = combine([image], rotation[-image.shape[1] :]).norm(dim=0)
        has_enough = len(wanted) == count
        converged = tolerance is not None and has_enough and has_converged(values, residuals, tolerance)
        free_dimensions = start.shape[0] - len(projected)
        if converged or iteration == iterations or free_dimensions == 0:
            break
        scale = float(values.abs().max()) or 1.0
        blocks.append(next_block(image[:, :free_dimensions], blocks, scale))
    return Eigenpairs(values, combine(blocks, rotation), residuals, len(projected))


@full_precision()
def rayleigh_ritz(
    basis: Float[Tensor, "n k"], image: Float[Tensor, "n k"], which: Which = "magnitude"
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"], Float[Tensor, " k"]]:
    """Return Ritz values, the rotation from the basis to the Ritz vectors, and the residuals, the most wanted first."""
    values, rotation = small_eigh(inner_products(basis, image))
    order = order_of(values, which)
    values, rotation = values[order], rotation[:, order]
    squares = torch.zeros_like(values)
    turn = rotation.T.to(basis.dtype)
    scaled = values.to(basis.dtype).unsqueeze(1) * turn
    for piece, image_piece in zip(row_pieces(basis), row_pieces(image), strict=True):
        residual = torch.addmm(turn @ image_piece, scaled, piece, alpha=-1)
        squares += residual.square_().sum(dim=1)
    return values.to(basis.dtype), rotation.to(basis.dtype), squares.sqrt().to(basis.dtype)


def has_converged(values: Float[Tensor, " k"], residuals: Float[Tensor, " k"], tolerance: float) -> bool:
    """Whether every residual is below the tolerance relative to its value, or is rounding of the largest."""
    magnitudes = values.abs()
    rounding = 10 * torch.finfo(values.dtype).eps * magnitudes.max()
    return bool((residuals <= (tolerance * magnitudes).clamp_min(rounding)).all())


def order_of(values: Float[Tensor, " k"], which: Which) -> Tensor:
    """Return the indices that put the most wanted eigenvalue first."""
    return (values.abs() if which == "magnitude" else values).argsort(descending=True)


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
            return column_major(torch.linalg.qr(columns).Q)
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
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for piece, other in zip(row_pieces(left), row_pieces(right), strict=True):
        piece = piece.to(dtype)
        total += piece @ (piece if left is right else other.to(dtype)).T
    return total


@full_precision()
def multiply_in_place(columns: Float[Tensor, "n k"], matrix: Float[Tensor, "k k"]) -> Float[Tensor, "n k"]:
    """Overwrite the columns by columns @ matrix, a block of rows at a time."""
    transposed = matrix.T.to(columns.dtype)
    for piece in row_pieces(columns):
        piece.copy_(transposed @ piece)
    return columns


def row_pieces(columns: Float[Tensor, "n k"]) -> Iterator[Float[Tensor, "k m"]]:
    """Yield the columns in blocks of rows, transposed: each column is contiguous in memory, and multiplies best so."""
    yield from columns.T.split(max(1, NUMBERS_AT_ONCE // columns.shape[1]), dim=1)


def column_major(columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return a copy in which each column is contiguous, as a flat parameter vector should be."""
    return columns.T.clone(memory_format=torch.contiguous_format).T


def small_eigh(matrix: Float[Tensor, "k k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Decompose a small symmetric matrix in float64; NaN values where that fails."""
    # Round-off leaves the matrix slightly asymmetric, and eigh reads one triangle only.
    symmetric = (matrix + matrix.T).double() / 2
    try:
        values, rotation = torch.linalg.eigh(symmetric)
        return values, rotation
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.full_like(symmetric[0], torch.nan), torch.eye(len(symmetric)).to(symmetric)


def bordered(projected: Float[Tensor, "m m"], coupling: Float[Tensor, "mb b"]) -> Float[Tensor, "mb mb"]:
    """Return the projected matrix grown by the last block's column, and by its mirror image."""
    old, width = projected.shape[0], coupling.shape[1]
    grown = projected.new_zeros(old + width, old + width)
    grown[:old, :old] = projected
    grown[:, old:] = coupling
    grown[old:, :old] = coupling[:old].T
    return grown


@full_precision()
def remove_components(columns: Float[Tensor, "n b"], blocks: Sequence[Tensor]) -> Float[Tensor, "m b"]:
    """Make the columns orthogonal to all blocks, in place, and return the coefficients taken out."""
    taken: list[Tensor] = [block.new_zeros(block.shape[1], columns.shape[1]) for block in blocks]
    for _ in range(2):  # Twice is enough to reach rounding, even where the products are not summed in float64.
        for block, total in zip(blocks, taken, strict=True):
            coefficients = block.T @ columns
            columns.addmm_(block, coefficients, alpha=-1)
            total += coefficients
    return torch.cat(taken).double()


def next_block(image: Float[Tensor, "n b"], blocks: Sequence[Tensor], scale: float) -> Float[Tensor, "n b"]:
    """Return orthonormal columns that continue the Krylov space, orthogonal to all blocks.

    A perturbation at rounding level turns an invariant subspace, where the image vanishes, into a random restart.
    """
    generator = torch.Generator(image.device).manual_seed(len(blocks))
    noise = random_columns(image.shape[0], image.shape[1], generator, image.dtype)
    columns = column_major(image.add(noise, alpha=torch.finfo(image.dtype).eps * scale))
    for _ in range(2):
        remove_components(columns, blocks)
        columns = orthonormalize(columns)
    return columns


@full_precision()
def combine(blocks: Sequence[Tensor], coefficients: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
    """Return [blocks] @ coefficients without joining the blocks."""
    parts = coefficients.split([block.shape[1] for block in blocks])
    total = blocks[0].new_zeros(coefficients.shape[1], blocks[0].shape[0]).T
    for block, part in zip(blocks, parts, strict=True):
        total.addmm_(block, part)
    return total

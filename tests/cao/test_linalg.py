import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor
from torch_versions import has_mkldnn_precision

from cao import Lanczos, SubspaceIteration
from cao.linalg import columns as columns_module
from cao.linalg.columns import HERE, orthonormalize

SOLVERS = [SubspaceIteration, Lanczos]
SPECTRUM = [10.0, -9.0, 8.0, -5.0, 3.0] + [0.1] * 20


def matrix_with(spectrum: list[float], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    n = len(spectrum)
    basis = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    return ((basis * torch.tensor(spectrum, dtype=torch.float64)) @ basis.T).to(dtype)


def start(n: int, k: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return HERE.random(n, k, torch.Generator().manual_seed(seed), dtype)


class Counting:
    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.columns = matrix, 0

    def __matmul__(self, columns: Tensor) -> Tensor:
        self.columns += columns.shape[1]
        return self.matrix @ columns


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(("which", "wanted"), [("magnitude", [10.0, -9.0, 8.0]), ("algebraic", [10.0, 8.0, 3.0])])
def test_a_prescribed_spectrum_with_negative_values_is_found(solve, which, wanted):
    matrix = matrix_with(SPECTRUM)
    pairs = solve(300, tolerance=1e-9, which=which)(matrix, start(25, 3))
    torch.testing.assert_close(pairs.values, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(matrix @ pairs.vectors, pairs.vectors * pairs.values, atol=1e-7, rtol=0)


@pytest.mark.parametrize("solve", SOLVERS)
def test_eigenvalues_agree_with_scipy(solve):
    noise = torch.randn(60, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    matrix = (noise + noise.T) / 2
    expected = sorted(eigsh(matrix.numpy(), 4, which="LM")[0], key=abs, reverse=True)
    pairs = solve(2000, tolerance=1e-8)(matrix, start(60, 4))
    torch.testing.assert_close(pairs.values, torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_residuals_are_those_of_the_returned_pairs(solve, iterations):
    matrix = matrix_with(SPECTRUM)
    pairs = solve(iterations)(matrix, start(25, 3))
    expected = (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, expected, atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "spectrum",
    [[0.0] * 8, [2.0] * 8, [7.0] + [0.0] * 7, [4.0, 4.0, 4.0, 1e-9] + [0.0] * 4, [1e4, -1e-3] + [0.0] * 6],
    ids=["zero", "identity", "rank one", "repeated", "wide range"],
)
def test_deficient_and_repeated_spectra_give_orthonormal_eigenvectors(solve, dtype, spectrum):
    matrix = matrix_with(spectrum, dtype)
    pairs = solve(30)(matrix, start(8, 4, dtype))
    tolerance = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(4, dtype=dtype), atol=tolerance, rtol=0)
    expected = torch.tensor(sorted(spectrum, key=abs, reverse=True)[:4], dtype=dtype)
    torch.testing.assert_close(pairs.values, expected, atol=tolerance * max(map(abs, spectrum)), rtol=0)


@pytest.mark.parametrize("solve", SOLVERS)
def test_the_products_reported_are_the_products_made(solve):
    operator = Counting(matrix_with(SPECTRUM))
    assert solve(4)(operator, start(25, 2)).products == operator.columns == 2 * 5


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_tolerance_saves_products_and_is_kept(solve):
    operator = Counting(matrix_with([100.0, 1.0] + [0.1] * 20))
    pairs = solve(500, tolerance=1e-3)(operator, start(22, 1))
    assert pairs.residuals[0] <= 1e-3 * pairs.values[0]
    assert pairs.products == operator.columns < 10


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_good_start_needs_a_single_sweep(solve):
    matrix = matrix_with(SPECTRUM)
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
    top = eigenvectors[:, eigenvalues.abs().argsort(descending=True)[:2]]
    assert solve(100, tolerance=1e-6)(matrix, top).products == 2


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_non_finite_operator_gives_non_finite_pairs_and_no_exception(solve):
    assert not solve(3)(torch.full((6, 6), torch.nan), start(6, 2, torch.float32)).is_finite()


def test_the_start_columns_are_not_written_to():
    columns = start(25, 2)
    before = columns.clone()
    for solve in SOLVERS:
        solve(2)(matrix_with(SPECTRUM), columns)
    assert torch.equal(columns, before)


def test_lanczos_finds_more_pairs_than_its_block_is_wide():
    pairs = Lanczos(24, count=3)(matrix_with(SPECTRUM), start(25, 1))
    torch.testing.assert_close(pairs.values, torch.tensor([10.0, -9.0, 8.0], dtype=torch.float64))


def test_lanczos_stops_when_the_space_is_exhausted():
    pairs = Lanczos(100)(matrix_with([3.0, -2.0, 1.0, 0.0, 0.0]), start(5, 2))
    assert pairs.products == 5
    torch.testing.assert_close(pairs.values, torch.tensor([3.0, -2.0], dtype=torch.float64))


def test_lanczos_needs_fewer_products_than_subspace_iteration():
    matrix = matrix_with([1.0 / (i + 1) for i in range(40)])
    by_lanczos, by_iteration = (
        solve(500, tolerance=1e-4)(matrix, start(40, 2)).products for solve in (Lanczos, SubspaceIteration)
    )
    assert by_lanczos < by_iteration / 2


@settings(deadline=None, max_examples=50)
@given(
    spectrum=st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=12),
    k=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_ritz_values_never_leave_the_range_of_the_spectrum(spectrum, k, seed):
    matrix = matrix_with(spectrum, seed=seed)
    for solve in SOLVERS:
        values = solve(3)(matrix, start(len(spectrum), k, seed=seed)).values
        assert values.min() >= min(spectrum) - 1e-8
        assert values.max() <= max(spectrum) + 1e-8


@settings(deadline=None, max_examples=50)
@given(exponents=st.lists(st.integers(-12, 12), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_an_orthonormal_basis_spans_columns_of_any_scale(exponents, seed):
    columns = start(20, len(exponents), seed=seed) * 10.0 ** torch.tensor(exponents, dtype=torch.float64)
    basis = orthonormalize(columns.clone())
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(exponents), dtype=torch.float64))
    torch.testing.assert_close(basis @ (basis.T @ columns) / columns.norm(dim=0), columns / columns.norm(dim=0))


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-7, 0.0])
def test_nearly_dependent_float32_columns_become_orthonormal(gap):
    columns = start(1000, 2, torch.float32)
    columns[:, 1] = columns[:, 0] + gap * columns[:, 1]
    basis = orthonormalize(columns)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4, 1e-6])
def test_a_rough_basis_is_orthonormal_to_a_thousandth_and_spans_the_columns(gap):
    columns = start(1000, 3, torch.float32)
    columns[:, 1] = columns[:, 0] + gap * columns[:, 1]
    basis = orthonormalize(columns.clone(), is_rough=True).double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)
    outside = columns.double() - basis @ torch.linalg.lstsq(basis, columns.double()).solution
    assert outside.norm() < 1e-5 * columns.norm()


def test_passes_over_blocks_of_rows_equal_one_pass(monkeypatch):
    matrix, columns = matrix_with(SPECTRUM), start(25, 3)
    whole = SubspaceIteration(5)(matrix, columns)
    monkeypatch.setattr(columns_module, "NUMBERS_AT_ONCE", 12)
    in_blocks = SubspaceIteration(5)(matrix, columns)
    torch.testing.assert_close(in_blocks.values, whole.values)
    torch.testing.assert_close(in_blocks.vectors.abs(), whole.vectors.abs())


@has_mkldnn_precision
@pytest.mark.parametrize("solve", SOLVERS)
def test_only_the_users_own_products_are_in_reduced_precision(solve, monkeypatch):
    """Under TF32 a basis would not be orthonormal; a network may well be multiplied so."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    seen = {"user": set(), "basis": set()}

    class Operator:
        def __matmul__(self, columns):
            seen["user"].add(tuple(backend.fp32_precision for backend in backends))
            return matrix_with(SPECTRUM, torch.float32) @ columns

    def noted(*blocks):
        seen["basis"].add(tuple(backend.fp32_precision for backend in backends))
        return real(*blocks)

    real = columns_module.row_pieces
    monkeypatch.setattr(columns_module, "row_pieces", noted)
    try:
        torch.set_float32_matmul_precision("high")
        solve(2)(Operator(), start(25, 3, torch.float32))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"user": {("tf32", "tf32")}, "basis": {("ieee", "ieee")}}


def test_small_matrices_are_decomposed_in_float64(monkeypatch):
    real, seen = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: seen.append(matrix.dtype) or real(matrix))
    for solve in SOLVERS:
        solve(1)(matrix_with(SPECTRUM, torch.float32), start(25, 3, torch.float32))
    assert set(seen) == {torch.float64}


@pytest.mark.parametrize("solve", SOLVERS)
def test_an_operator_may_carry_a_graph(solve):
    matrix = torch.diag(torch.tensor([5.0, 1.0, 2.0])).requires_grad_()
    pairs = solve(30)(matrix, torch.eye(3)[:, :2] + 0.1)
    assert pairs.values.tolist() == pytest.approx([5.0, 2.0], rel=1e-4)
    assert not pairs.values.requires_grad
    assert not pairs.vectors.requires_grad


@pytest.mark.parametrize("solver", [SubspaceIteration, Lanczos])
def test_a_word_that_stands_for_no_eigenvalues_is_refused(solver):
    # Here types are checked before the words are, and users have no such check.
    unchecked = object.__new__(solver)
    object.__setattr__(unchecked, "which", "largest")
    with pytest.raises(ValueError, match="which must be one of magnitude, algebraic, both-ends, got 'largest'"):
        unchecked.__post_init__()


def test_subspace_iteration_refuses_to_look_for_both_ends():
    with pytest.raises(ValueError, match='got "both-ends"; use Lanczos'):
        SubspaceIteration(which="both-ends")

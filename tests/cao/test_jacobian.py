"""The Jacobian of residuals at points against the dense one, row by row: where it is formed, where not, and why."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from residuals import (
    WITH_JACOBIAN,
    WITHOUT_JACOBIAN,
    Residuals,
    coupled_points,
    dense,
    dense_jacobian,
    network,
    points,
    poisson,
    regression,
    slope,
)  # fmt: skip
from torch import Tensor, nn

from cao import CAO, LeastSquares, extreme_eigenpairs, spectral_density, top_eigenpairs, trace
from cao.curvature import row_layers
from cao.curvature.linearized import ExplicitLinearized, GraphLinearized


@pytest.mark.parametrize("problem", WITH_JACOBIAN + WITHOUT_JACOBIAN)
def test_the_jacobian_is_explicit_where_points_have_residuals_of_their_own(
    problem: Callable[[nn.Module], Residuals],
) -> None:
    model = network()
    linearized = LeastSquares(problem(model), model.parameters()).linearize()
    assert type(linearized) is (ExplicitLinearized if problem in WITH_JACOBIAN else GraphLinearized)


def test_a_jacobian_too_large_for_the_limit_is_not_formed() -> None:
    model = network()
    size = sum(p.numel() for p in model.parameters())
    limits = {12 * size: ExplicitLinearized, 12 * size - 1: GraphLinearized}
    for limit, expected in limits.items():
        operator = LeastSquares(regression(model), model.parameters(), max_jacobian_size=limit)
        assert type(operator.linearize()) is expected


def checked(operator: LeastSquares, residuals: Residuals, params: list[Tensor]) -> type:
    """Compare an operator with the dense matrix where the parameters are now, and return its kind."""
    linearized, jacobian = operator.linearize(), dense_jacobian(residuals, params)
    torch.testing.assert_close(dense(linearized, params), 2 * jacobian.T @ jacobian)
    return type(linearized)


def moved(params: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in params:
            param += torch.randn(param.shape, generator=generator, dtype=param.dtype)


def diffusion_to_be_found(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    """An inverse problem: without a head, nothing depends on the diffusion at first."""
    inside, diffusion = points(12), torch.ones((), dtype=torch.float64, requires_grad=True)
    nn.init.zeros_(model[4].weight)  # type: ignore[index, arg-type]

    def residuals() -> Tensor:
        gradient = slope(model(inside), inside)
        return gradient[:, 1] - diffusion * slope(gradient[:, 0], inside)[:, 0] - 1

    return residuals, [diffusion]


def computed_weight(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    inside, factor = points(12), torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    return lambda: model(inside + nn.functional.linear(inside, factor.T @ factor, shift)), [factor, shift]


def coupling_through_a_closed_gate(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    inside, gate = points(12), torch.zeros((2, 2), dtype=torch.float64, requires_grad=True)

    def residuals() -> Tensor:
        mean = nn.functional.linear(inside.tanh().mean(dim=0, keepdim=True).expand_as(inside), gate)
        values = model(inside + mean)
        return values - nn.functional.linear(values.mean().expand(12, 2), gate)[:, :1]

    return residuals, [gate]


@pytest.mark.parametrize("problem", [diffusion_to_be_found, computed_weight, coupling_through_a_closed_gate])
def test_what_shows_only_when_parameters_have_moved_is_seen_then(problem: Callable[[nn.Module], Any]) -> None:
    model = network()
    residuals, others = problem(model)
    params = [*model.parameters(), *others]
    operator = LeastSquares(residuals, params)
    for _ in range(3):
        checked(operator, residuals, params)
        moved(params)


def test_residuals_that_are_sorted_find_their_places_again() -> None:
    model, left, right = network(), points(12), points(12, seed=1)
    params = list(model.parameters())

    def residuals() -> Tensor:
        return model(left)[:, 0].sort().values - model(right)[:, 0].sort().values

    operator = LeastSquares(residuals, params)
    for _ in range(3):
        assert checked(operator, residuals, params) is ExplicitLinearized
        moved(params)


def test_residuals_that_are_selected_by_their_sign_may_change_in_number() -> None:
    model, inside = network(), points(12)
    params = list(model.parameters())

    def residuals() -> tuple[Tensor, ...]:
        values = model(inside)[:, 0]
        return values[values > values.mean()], values - 1

    operator = LeastSquares(residuals, params)
    for _ in range(4):
        checked(operator, residuals, params)
        moved(params)


def test_rows_with_slopes_that_cancel_do_not_keep_wrong_places_in_float32() -> None:
    """At u = 1/√3 the slope of u³ − u is zero, and rounding errors decide to which of many residuals it belongs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inside = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)), torch.rand(20_000, 2)
        probe = torch.randn(20_000, 1)
    with torch.no_grad():
        model[2].bias += 3**-0.5 - model(inside).mean()
    params = list(model.parameters())

    def residuals() -> Tensor:
        values = model(inside)
        return values**3 - values

    operator = LeastSquares(residuals, params)
    operator.linearize()
    moved(params)
    pulled = operator.linearize().pull(probe)[:, 0]
    expected = torch.cat([part.reshape(-1) for part in torch.autograd.grad(residuals(), params, probe)])
    assert float((pulled - expected).norm() / expected.norm()) < 1e-3


def test_residuals_that_depend_on_whether_there_is_a_derivative_are_right() -> None:
    model, inside = network(), points(6)
    params = list(model.parameters())

    def residuals() -> tuple[Tensor, ...]:
        values = model(inside)
        slopes = torch.autograd.grad(values.sum(), params, create_graph=True, allow_unused=True)
        return values, *(part for part in slopes if part is not None and part.requires_grad)

    checked(LeastSquares(residuals, params), residuals, params)


@pytest.mark.parametrize("is_allowed", [False, True])
def test_residuals_may_contain_derivatives_by_the_parameters(is_allowed: bool) -> None:
    model, inside = network(), points(6)
    params = list(model.parameters())

    def residuals() -> Tensor:
        total = model(inside).sum()
        (slopes,) = torch.autograd.grad(total, params[0], create_graph=True, allow_unused=is_allowed)
        return slopes * total

    checked(LeastSquares(residuals, params), residuals, params)


@pytest.mark.parametrize(("outputs", "expected"), [(8, ExplicitLinearized), (9, GraphLinearized)])
def test_points_with_many_residuals_get_no_jacobian(outputs: int, expected: type) -> None:
    model, inside = network(outputs), points(6)
    assert type(LeastSquares(lambda: model(inside), model.parameters()).linearize()) is expected


@pytest.mark.parametrize("conditions", [1, 20])
def test_residuals_of_other_points_are_not_counted_as_residuals_of_a_point(conditions: int) -> None:
    model, places = network(), [points(6, seed) for seed in range(conditions)]
    linearized = LeastSquares(
        lambda: [slope(model(inside), inside) for inside in places], model.parameters()
    ).linearize()
    assert isinstance(linearized, ExplicitLinearized)
    assert linearized.per_point == 2


def test_a_layer_that_is_passed_twice_has_the_gradients_of_both_passages() -> None:
    first, layer, last = nn.Linear(2, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    params = [*first.parameters(), *layer.parameters(), *last.parameters()]
    inside = points(6)

    def residuals() -> Tensor:
        return slope(last(layer(layer(first(inside).tanh()).tanh()).tanh()), inside)

    assert checked(LeastSquares(residuals, params), residuals, params) is ExplicitLinearized


def test_a_point_that_was_dead_is_placed_when_it_comes_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    params, inside = list(model.parameters()), points(12)
    with torch.no_grad():
        model[0].weight.fill_(-1)  # type: ignore[union-attr]
        model[0].bias.fill_(0.7)  # type: ignore[union-attr]
    operator = LeastSquares(lambda: model(inside) * torch.arange(12)[:, None], params)
    assert type(operator.linearize()) is ExplicitLinearized
    with torch.no_grad():
        model[0].bias.fill_(1.5)  # type: ignore[union-attr]
    jacobian = dense_jacobian(operator.residuals, params)  # type: ignore[arg-type]
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_a_parameter_outside_the_layers_is_seen() -> None:
    model, coefficient = network(), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    params, inside = [*model.parameters(), coefficient], points(12)

    def residuals() -> Tensor:
        return slope(model(inside), inside)[:, 0] - coefficient * model(inside)[:, 0]

    jacobian = dense_jacobian(residuals, params)
    torch.testing.assert_close(dense(LeastSquares(residuals, params), params), 2 * jacobian.T @ jacobian)


def test_a_normalised_weight_has_a_jacobian() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2).double())
    params, inside = list(layer.parameters()), points(6)
    jacobian = dense_jacobian(lambda: layer(inside), params)
    operator = LeastSquares(lambda: layer(inside), params)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def trainable_slope(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    factor, inside = torch.full((5,), 0.7, dtype=torch.float64, requires_grad=True), points(12)
    return lambda: slope(model[2:](torch.tanh(factor * model[0](inside))), inside), [factor]  # type: ignore[index, operator]


def trainable_frequencies(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    frequencies, inside = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), points(12)
    return lambda: slope(model[2:](torch.sin(inside @ frequencies).sum(1, True).expand(12, 5)), inside), [frequencies]  # type: ignore[index, operator]


def weight_used_elsewhere(model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    inside = points(12)
    return lambda: (model(inside), 0.1 * model[4].weight.flatten()), []  # type: ignore[index, operator, union-attr]


def curve_of_few_parameters(_model: nn.Module) -> tuple[Residuals, list[Tensor]]:
    times, rates = torch.linspace(0, 1, 50, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    rates.requires_grad_()
    return lambda: (rates[0] * torch.exp(-rates[1] * times) - 1).reshape(5, 10), [rates]


@pytest.mark.parametrize(
    "problem",
    [
        diffusion_to_be_found, trainable_slope, trainable_frequencies, weight_used_elsewhere, curve_of_few_parameters,
        computed_weight,
    ],
)  # fmt: skip
def test_a_few_parameters_outside_linear_layers_have_columns_of_their_own(problem: Callable[[nn.Module], Any]) -> None:
    model = network()
    residuals, others = problem(model)
    params = [*others, *model.parameters()]
    if problem in (trainable_frequencies, trainable_slope):
        params = [p for p in params if p.requires_grad]
    if problem is curve_of_few_parameters:
        params = others
    operator = LeastSquares(residuals, params)
    for _ in range(3):
        assert checked(operator, residuals, params) is ExplicitLinearized
        assert operator.derivative == "Jacobian"
        moved(params)


def test_many_parameters_outside_linear_layers_are_the_reason_for_products() -> None:
    model, inside, factors = network(), points(12), torch.ones(12, 6, dtype=torch.float64, requires_grad=True)
    operator = LeastSquares(lambda: model(inside) * factors, [*model.parameters(), factors])
    assert operator.derivative == "none yet"
    assert type(operator.linearize()) is GraphLinearized
    assert operator.derivative == "products: 72 parameters lie outside linear layers, more than 64"


@pytest.mark.parametrize(
    ("problem", "limit", "reason"),
    [
        (coupled_points, 1 << 25, "products: a residual depends on several points"),
        (regression, 10, "products: the Jacobian has 528 numbers, more than max_jacobian_size=10"),
    ],
)
def test_the_kind_of_derivative_has_a_reason(
    problem: Callable[[nn.Module], Residuals], limit: int, reason: str
) -> None:
    model = network()
    operator = LeastSquares(problem(model), model.parameters(), max_jacobian_size=limit)
    operator.linearize()
    assert operator.derivative.startswith(reason)


@pytest.mark.parametrize("weight", [1.0, 1e-6, 1e-12])
def test_a_light_vector_of_coupled_points_is_not_overlooked(weight: float) -> None:
    model, inside = network(), points(12)
    params = list(model.parameters())
    coupled = coupled_points(model)
    operator = LeastSquares(lambda: (model(inside), weight * coupled()), params)  # type: ignore[operator]
    assert type(operator.linearize()) is GraphLinearized


def test_rows_of_a_jacobian_may_be_placed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    params, whole = list(model.parameters()), LeastSquares(poisson(model), model.parameters()).linearize()
    monkeypatch.setattr(row_layers, "LARGEST_PIECE", 50)
    operator = LeastSquares(poisson(model), params)
    assert checked(operator, poisson(model), params) is ExplicitLinearized
    assert torch.equal(operator.linearize().jacobian, whole.jacobian)  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_a_lack_of_memory_is_named_and_lasts_no_longer_than_it_is_there() -> None:
    model = nn.Sequential(nn.Linear(2, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 1)).double()
    operator = LeastSquares(lambda: model(inside), model.parameters())
    inside = points(100)
    operator.linearize()
    inside = points(5_000)  # Whose Jacobian has 206 MB.
    with address_space_limited_to(more=150 << 20):
        assert type(operator.linearize()) is GraphLinearized
    assert operator.derivative == "products: there is too little memory for the Jacobian"
    assert type(operator.linearize()) is ExplicitLinearized


@contextmanager
def address_space_limited_to(more: int) -> Iterator[None]:
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_error_of_the_residuals_is_not_taken_for_a_lack_of_structure() -> None:
    model, inside, is_broken = network(), points(12), False

    def residuals() -> Tensor:
        if is_broken:
            raise RuntimeError("the file of the measurements is gone")
        return model(inside)

    operator = LeastSquares(residuals, model.parameters())
    operator.linearize()
    is_broken = True
    with pytest.raises(RuntimeError, match="the file of the measurements is gone"):
        operator.linearize()
    is_broken = False
    assert type(operator.linearize()) is ExplicitLinearized


def test_parameters_of_two_precisions_have_a_jacobian() -> None:
    model, inside = network().float(), points(12).float()
    factor = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    params = [*model.parameters(), factor]
    operator = LeastSquares(lambda: factor * model(inside).double(), params)
    jacobian = dense_jacobian(lambda: factor * model(inside).double(), params)
    linearized = operator.linearize()
    assert type(linearized) is ExplicitLinearized
    torch.testing.assert_close(dense(linearized, params), 2 * jacobian.T @ jacobian, rtol=1e-5, atol=1e-5)


def runs_of_residuals(use: Callable[[LeastSquares, list[Tensor]], object]) -> int:
    model, inside, runs = network(), points(12), 0
    params = list(model.parameters())

    def residuals() -> Tensor:
        nonlocal runs
        runs += 1
        return model(inside)

    operator = LeastSquares(residuals, params)
    operator.linearize()
    runs = 0
    use(operator, params)
    return runs


@pytest.mark.parametrize(
    "use",
    [
        lambda operator, _: top_eigenpairs(operator, 2),
        lambda operator, _: extreme_eigenpairs(operator, 2),
        lambda operator, _: trace(operator),
        lambda operator, _: spectral_density(operator, iterations=8),
        lambda operator, params: CAO(params, lr=0.1, rank=2).refresh(operator),
    ],
    ids=["top", "extreme", "trace", "density", "refresh"],
)
def test_residuals_are_linearised_once_at_one_position(use: Callable[[LeastSquares, list[Tensor]], object]) -> None:
    assert runs_of_residuals(use) == 2  # One of them is the check.

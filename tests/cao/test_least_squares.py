"""The operator of least squares against the dense JᵀJ, row by row, on residuals as users write them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import flat_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cao import LeastSquares
from cao.linearized import ExplicitLinearized, ForwardLinearized, GraphLinearized

Residuals = Callable[[], Tensor | tuple[Tensor, ...]]


def network(outputs: int = 1, inputs: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)]
        return nn.Sequential(*layers).double()


def points(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, generator=generator, dtype=torch.float64).requires_grad_()


def slope(outputs: Tensor, inputs: Tensor) -> Tensor:
    return torch.autograd.grad(outputs, inputs, torch.ones_like(outputs), create_graph=True)[0]


def regression(model: nn.Module) -> Residuals:
    inputs = points(12)
    return lambda: model(inputs) - torch.sin(inputs.sum(dim=1, keepdim=True))


def poisson(model: nn.Module) -> Residuals:
    inside, border = points(12), points(5, seed=1)

    def residuals() -> tuple[Tensor, ...]:
        gradient = slope(model(inside), inside)
        laplacian = slope(gradient[:, 0], inside)[:, 0] + slope(gradient[:, 1], inside)[:, 1]
        return (laplacian - 1) / math.sqrt(12), model(border) / math.sqrt(5)

    return residuals


def burgers(model: nn.Module) -> Residuals:
    inside, first = points(12), points(5, seed=1)

    def residuals() -> tuple[Tensor, ...]:
        value = model(inside)
        gradient = slope(value, inside)
        curvature = slope(gradient[:, 0], inside)[:, :1]
        return gradient[:, 1:] + value * gradient[:, :1] - 0.01 * curvature, model(first) + 1

    return residuals


def korteweg_de_vries(model: nn.Module) -> Residuals:
    inside = points(12)

    def residuals() -> Tensor:
        value = model(inside)
        first = slope(value, inside)
        third = slope(slope(first[:, 0], inside)[:, 0], inside)
        return first[:, 1:] + 6 * value * first[:, :1] + third[:, :1]

    return residuals


def periodic_convection(model: nn.Module) -> Residuals:
    inside, left, right = points(12), points(5, seed=1), points(5, seed=2)

    def residuals() -> tuple[Tensor, ...]:
        gradient = slope(model(inside), inside)
        return gradient[:, 1] + 3 * gradient[:, 0], model(left) - model(right)

    return residuals


def joined(model: nn.Module) -> Residuals:
    """All residuals in one vector, the border's first and backwards."""
    inside, border = points(12), points(5, seed=1)
    return lambda: torch.cat([model(border)[:, 0].flip(0), slope(model(inside), inside)[:, 1]])


def two_equations(model: nn.Module) -> Residuals:
    inside = points(12)
    return lambda: slope(model(inside), inside)


def mean_over_points(model: nn.Module) -> Residuals:
    inside = points(12)
    return lambda: (model(inside).mean() - 1, model(inside) ** 2)


def coupled_points(model: nn.Module) -> Residuals:
    """Each residual depends on two rows of one call, and each row enters two residuals."""
    inside = points(12)

    def residuals() -> Tensor:
        values = model(inside)[:, 0]
        return values[1:] - values[:-1] ** 2

    return residuals


def three_dimensional_inputs(model: nn.Module) -> Residuals:
    inside = points(12).reshape(3, 4, 2)
    return lambda: model(inside) - 1


POINTWISE = [
    regression, poisson, burgers, korteweg_de_vries, periodic_convection, joined, two_equations, mean_over_points,
]  # fmt: skip
NOT_POINTWISE = [coupled_points, three_dimensional_inputs]


def dense_jacobian(residuals: Residuals, params: list[Tensor]) -> Tensor:
    result = residuals()
    tensors = (result,) if isinstance(result, Tensor) else result
    # Columns of a matrix are vectors of their own, in the order of LeastSquares; the order does not matter to JᵀJ.
    entries = [entry for tensor in tensors for entry in tensor.reshape(-1)]
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in entries]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def dense(operator: object, params: list[Tensor]) -> Tensor:
    size = sum(p.numel() for p in params)
    return operator @ torch.eye(size, dtype=torch.float64)  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("limit", [0, 1 << 25])
@pytest.mark.parametrize("problem", POINTWISE + NOT_POINTWISE)
def test_products_are_those_of_the_dense_matrix(problem: Callable[[nn.Module], Residuals], limit: int) -> None:
    model = network()
    params, residuals = list(model.parameters()), problem(model)
    jacobian = dense_jacobian(residuals, params)
    operator = LeastSquares(residuals, params, max_jacobian_size=limit)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


@pytest.mark.parametrize("problem", POINTWISE + NOT_POINTWISE)
def test_the_jacobian_is_explicit_where_points_have_residuals_of_their_own(
    problem: Callable[[nn.Module], Residuals],
) -> None:
    model = network()
    linearized = LeastSquares(problem(model), model.parameters()).linearize()
    assert type(linearized) is (ExplicitLinearized if problem in POINTWISE else GraphLinearized)


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


def test_residuals_behind_a_reentrant_checkpoint_are_refused() -> None:
    model, inside = network(), points(6)

    def residuals() -> Tensor:
        return model[4](checkpoint(model[:4], inside, use_reentrant=True))  # type: ignore[index, operator, no-any-return]

    for limit in (0, 1 << 25):
        with pytest.raises(RuntimeError, match="reentrant"):
            LeastSquares(residuals, model.parameters(), max_jacobian_size=limit).linearize()


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


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_the_operator_follows_the_parameters_and_a_linearization_does_not(limit: int) -> None:
    model = network()
    params = list(model.parameters())
    operator = LeastSquares(poisson(model), params, max_jacobian_size=limit)
    fixed, before = operator.linearize(), dense(operator, params)
    with torch.no_grad():
        for param in params:
            param.mul_(1.5)
    jacobian = dense_jacobian(poisson(model), params)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)
    if limit:
        torch.testing.assert_close(dense(fixed, params), before)


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


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_the_number_of_points_may_change(limit: int) -> None:
    model, inside = network(), [points(12)]
    params = list(model.parameters())
    operator = LeastSquares(lambda: model(inside[0]) - 1, params, max_jacobian_size=limit)
    operator.linearize()
    inside[0] = points(7, seed=3)
    jacobian = dense_jacobian(operator.residuals, params)  # type: ignore[arg-type]
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_a_parameter_outside_the_layers_is_seen() -> None:
    model, coefficient = network(), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    params, inside = [*model.parameters(), coefficient], points(12)

    def residuals() -> Tensor:
        return slope(model(inside), inside)[:, 0] - coefficient * model(inside)[:, 0]

    jacobian = dense_jacobian(residuals, params)
    torch.testing.assert_close(dense(LeastSquares(residuals, params), params), 2 * jacobian.T @ jacobian)


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_eigenpairs_are_those_of_a_dense_decomposition(limit: int) -> None:
    model = network()
    params = list(model.parameters())
    operator = LeastSquares(poisson(model), params, max_jacobian_size=limit).linearize()
    matrix = dense(operator, params)
    expected = torch.linalg.eigvalsh(matrix).flip(0)
    start = torch.randn(len(matrix), 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = operator.eigenpairs(start)
    torch.testing.assert_close(pairs.values, expected[:17], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(matrix @ pairs.vectors, pairs.vectors * pairs.values, rtol=1e-6, atol=1e-6)
    assert pairs.products == 17


def test_small_eigenvalues_keep_their_digits_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(30, 6, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    singular = torch.logspace(0, -5, 6, dtype=torch.float64)
    jacobian = (left * singular @ right.T).float()
    pairs = ExplicitLinearized(jacobian, [torch.zeros(30)]).eigenpairs(torch.randn(30, 6, generator=generator))
    torch.testing.assert_close(pairs.values.double(), 2 * singular**2, rtol=0.1, atol=0)


def test_random_streams_and_gradients_stay_as_they_are() -> None:
    model = network()
    state = torch.get_rng_state()
    LeastSquares(poisson(model), model.parameters()) @ torch.ones(44, 2, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrong", [torch.zeros(3), 3.0])
def test_residuals_must_be_a_function_of_tensors(wrong: object) -> None:
    with pytest.raises(ValueError, match="residuals must"):
        LeastSquares(wrong, [torch.zeros(3, requires_grad=True)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residuals must"):
        LeastSquares(lambda: [wrong, 1.0], [torch.zeros(3, requires_grad=True)]).linearize()  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda theta: theta.detach(), "the residuals have no graph"),
        (lambda theta: theta.bfloat16(), "must be in float32 or float64, got torch.bfloat16"),
        (lambda theta: theta * 1j, "must be in float32 or float64, got torch.complex64"),
        (lambda theta: None, "must return one tensor or several"),
        (lambda theta: theta[:0], "the residuals are empty; return at least one number"),
    ],
    ids=["detached", "bfloat16", "complex", "none", "empty"],
)
def test_residuals_without_a_jacobian_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    theta = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        LeastSquares(lambda: change(theta), [theta]).linearize()


class Square(torch.autograd.Function):
    """x², which can be differentiated backwards only once, and forwards."""

    @staticmethod
    def forward(inputs: Tensor) -> Tensor:
        return inputs * inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * tangent


class SquareBackwardsOnly(Square):
    """x², which has nothing but a first derivative by reverse mode."""

    jvp = torch.autograd.Function.jvp


class SquareWithWrongTangent(Square):
    """x² with a mistake in its forward derivative."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * tangent  # type: ignore[no-any-return]


def test_forward_mode_takes_over_where_reverse_mode_works_only_once() -> None:
    model, inside = network(), points(12)
    params = list(model.parameters())

    def residuals() -> Tensor:
        values = model(inside)
        return slope(slope(values, inside)[:, 0], inside)[:, :1] + Square.apply(values)  # type: ignore[no-untyped-call]

    before, graph = flat_params(model), residuals()
    operator = LeastSquares(residuals, params, max_jacobian_size=0)
    assert type(operator.linearize()) is ForwardLinearized
    jacobian = dense_jacobian(residuals, params)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)
    assert torch.equal(flat_params(model), before)
    graph.sum().backward()  # A graph that was made before the tangents were written.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (SquareBackwardsOnly, "no second derivative .it has no forward derivative either"),
        (SquareWithWrongTangent, "its forward derivative, too, contradicts its backward pass"),
    ],
)
def test_residuals_that_can_be_differentiated_only_once_are_refused(
    function: type[torch.autograd.Function], message: str
) -> None:
    theta = torch.tensor([2.0, 3.0], requires_grad=True)
    operator = LeastSquares(lambda: function.apply(theta) - 1, [theta])  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=message):
        operator @ torch.eye(2)


def test_a_normalised_weight_has_a_jacobian() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2).double())
    params, inside = list(layer.parameters()), points(6)
    jacobian = dense_jacobian(lambda: layer(inside), params)
    operator = LeastSquares(lambda: layer(inside), params)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    trainable = [p for p in model.parameters() if p.requires_grad]
    for limit in (0, 1 << 25):
        operator = LeastSquares(poisson(model), model.parameters(), max_jacobian_size=limit)
        jacobian = dense_jacobian(poisson(model), trainable)
        torch.testing.assert_close(dense(operator, trainable), 2 * jacobian.T @ jacobian)


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_empty_residuals_among_others_change_nothing(limit: int) -> None:
    model, inside = network(), points(6)
    params = list(model.parameters())
    operator = LeastSquares(lambda: (model(inside), model(inside[:0])), params, max_jacobian_size=limit)
    jacobian = dense_jacobian(lambda: model(inside), params)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_residuals_in_double_precision_of_single_parameters_are_taken_in_theirs(limit: int) -> None:
    model, inside = network().float(), points(6).float()
    params = list(model.parameters())
    operator = LeastSquares(lambda: model(inside).double() - 1, params, max_jacobian_size=limit)
    jacobian = dense_jacobian(lambda: model(inside), params)
    torch.testing.assert_close(operator @ torch.eye(44), 2 * jacobian.T @ jacobian)


def test_parameters_that_require_no_gradient_are_refused() -> None:
    for params in ([], [torch.zeros(3)]):
        with pytest.raises(ValueError, match="LeastSquares needs a parameter that requires a gradient, got none"):
            LeastSquares(lambda: torch.ones(3), params)

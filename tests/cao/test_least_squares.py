"""The operator of least squares against the dense JᵀJ, by any kind of derivative, and what it refuses."""

from collections.abc import Callable, Iterator
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
    two_equations,
)  # fmt: skip
from small_models import flat_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cao import GaussNewton, Hessian, LeastSquares
from cao.curvature.linearized import ExplicitLinearized, ForwardLinearized


@pytest.mark.parametrize("limit", [0, 1 << 25])
@pytest.mark.parametrize("problem", WITH_JACOBIAN + WITHOUT_JACOBIAN)
def test_products_are_those_of_the_dense_matrix(problem: Callable[[nn.Module], Residuals], limit: int) -> None:
    model = network()
    params, residuals = list(model.parameters()), problem(model)
    jacobian = dense_jacobian(residuals, params)
    operator = LeastSquares(residuals, params, max_jacobian_size=limit)
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_residuals_behind_a_reentrant_checkpoint_are_refused() -> None:
    model, inside = network(), points(6)

    def residuals() -> Tensor:
        return model[4](checkpoint(model[:4], inside, use_reentrant=True))  # type: ignore[index, operator, no-any-return]

    for limit in (0, 1 << 25):
        with pytest.raises(RuntimeError, match="reentrant"):
            LeastSquares(residuals, model.parameters(), max_jacobian_size=limit).linearize()


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


@pytest.mark.parametrize("problem", [poisson, two_equations, coupled_points])
@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_a_linearization_knows_the_loss_at_its_position(problem: Callable[[nn.Module], Residuals], limit: int) -> None:
    model = network()
    result = problem(model)()
    parts = (result,) if isinstance(result, Tensor) else result
    expected = sum(part.detach().square().sum().item() for part in parts)
    linearized = LeastSquares(problem(model), model.parameters(), max_jacobian_size=limit).linearize()
    assert float(linearized.loss) == pytest.approx(expected, rel=1e-12)
    assert not linearized.loss.requires_grad


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_the_number_of_points_may_change(limit: int) -> None:
    model, inside = network(), [points(12)]
    params = list(model.parameters())
    operator = LeastSquares(lambda: model(inside[0]) - 1, params, max_jacobian_size=limit)
    operator.linearize()
    inside[0] = points(7, seed=3)
    jacobian = dense_jacobian(operator.residuals, params)  # type: ignore[arg-type]
    torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


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
    operator = ExplicitLinearized(jacobian, torch.zeros(30), [torch.zeros(30)])
    pairs = operator.eigenpairs(torch.randn(30, 6, generator=generator))
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


def test_tied_parameters_count_once() -> None:
    layer, inside = nn.Linear(2, 2).double(), points(6)
    params = list(layer.parameters())

    def residuals() -> Tensor:
        return layer(layer(inside).tanh())

    jacobian = dense_jacobian(residuals, params)
    for limit in (0, 1 << 25):
        operator = LeastSquares(residuals, [*params, *params], max_jacobian_size=limit)
        torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_residuals_under_autocast_are_refused_by_name() -> None:
    model, inside = network().float(), points(6).detach().float().requires_grad_()

    def residuals() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return slope(model(inside), inside).float() - 1

    for limit in (0, 1 << 25):
        with pytest.raises(ValueError, match=r"got torch.bfloat16 on the way; .* outside torch.autocast"):
            LeastSquares(residuals, model.parameters(), max_jacobian_size=limit).linearize()


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_an_autocast_around_everything_takes_no_digits(limit: int) -> None:
    model, inside = network().float(), points(6).detach().float().requires_grad_()
    params = list(model.parameters())
    jacobian = dense_jacobian(lambda: slope(model(inside), inside), params)
    operator = LeastSquares(lambda: slope(model(inside), inside), params, max_jacobian_size=limit)
    with torch.autocast("cpu", torch.bfloat16):
        product = operator @ torch.eye(44)
    assert operator.derivative == "Jacobian" or not limit
    torch.testing.assert_close(product, 2 * jacobian.T @ jacobian, rtol=1e-5, atol=1e-5)


def test_residuals_may_be_yielded_and_leave_buffers_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    inside, before = points(6), model[1].running_mean.clone()  # type: ignore[operator, union-attr]

    def residuals() -> Iterator[Tensor]:
        yield model(inside)
        yield model(inside) ** 2

    LeastSquares(residuals, model.parameters()).linearize()  # type: ignore[arg-type]
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]


def test_a_parameter_without_entries_changes_nothing() -> None:
    model, inside = network(), points(6)
    params = [*model.parameters(), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))]
    shift = nn.Linear(2, 0).double()

    def residuals() -> Tensor:
        return model(inside) + shift(inside).sum(dim=1, keepdim=True)

    jacobian = dense_jacobian(residuals, [*params, *shift.parameters()])
    for limit in (0, 1 << 25):
        operator = LeastSquares(residuals, [*params, *shift.parameters()], max_jacobian_size=limit)
        torch.testing.assert_close(dense(operator, params), 2 * jacobian.T @ jacobian)


def test_a_lazy_module_is_refused_by_name() -> None:
    for build in (LeastSquares, Hessian):
        with pytest.raises(ValueError, match="lazy module has no shape yet; run the model once"):
            build(lambda: torch.ones(3), nn.LazyLinear(2).parameters())
    with pytest.raises(ValueError, match="lazy module has no shape yet"):
        GaussNewton(nn.LazyLinear(2), torch.ones(3, 2), torch.sum)


@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_several_functions_are_one_after_the_other_what_they_are_together(limit: int) -> None:
    model = network()
    params, functions = list(model.parameters()), [poisson(model), regression(model)]
    jacobian = torch.cat([dense_jacobian(function, params) for function in functions])
    source = LeastSquares(functions, params, max_jacobian_size=limit)
    linearized = source.linearize()
    torch.testing.assert_close(dense(source, params), 2 * jacobian.T @ jacobian)
    torch.testing.assert_close(dense(linearized, params), 2 * jacobian.T @ jacobian)
    start = torch.eye(len(flat_params(model)), dtype=torch.float64)
    expected = torch.linalg.eigvalsh(2 * jacobian.T @ jacobian).flip(0)
    torch.testing.assert_close(linearized.eigenpairs(start).values, expected[: len(jacobian)], atol=1e-12, rtol=1e-8)
    torch.testing.assert_close(linearized.loss, source.residuals().square().sum())
    loss = source.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in params])  # type: ignore[union-attr]
    torch.testing.assert_close(gradient, 2 * jacobian.T @ source.residuals(), check_dtype=False)
    torch.testing.assert_close(loss, linearized.loss)


@pytest.mark.parametrize(("wrong", "name"), [([], "list"), ([3], "int")])
def test_functions_that_are_none_are_refused(wrong: object, name: str) -> None:
    with pytest.raises(ValueError, match=f"or several such functions, got {name}"):
        LeastSquares(wrong, [torch.ones(2, requires_grad=True)])  # type: ignore[arg-type]

"""Problems of scientific machine learning: exact solutions, finite differences and a published slope as oracles."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from cao import LeastSquares
from cao.curvature.linearized import ExplicitLinearized, GraphLinearized
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.allen_cahn import spectral_solution
from cao_lab.tasks.pde.burgers import VISCOSITY, cole_hopf, cole_hopf_row
from cao_lab.tasks.pde.problem import RATHORE, SMALL, Equation, ProblemConfig

TINY = ProblemConfig(width=6, depth=2, interior=40, initial=9, boundary=5)
CLOSED_FORMS = ["convection", "reaction", "wave", "poisson", "helmholtz", "regression"]
every_equation = pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_the_exact_solution_leaves_no_residual(name: str) -> None:
    equation = EQUATIONS[name]
    points = equation.domain.points(200, 33, 17, seed=1, dtype=torch.float64)
    for part in equation.residuals(equation.reference, points):
        assert part.abs().max() < 1e-11


@every_equation
def test_another_function_leaves_a_residual_in_every_condition(equation: Equation) -> None:
    def other(x: Tensor, t: Tensor) -> Tensor:
        return torch.exp(x + t) + x**3 * t

    points = equation.domain.points(50, 9, 5, seed=0, dtype=torch.float64)
    assert all(part.abs().max() > 1e-3 for part in equation.residuals(other, points))


@every_equation
def test_the_residual_of_the_equation_agrees_with_finite_differences(equation: Equation) -> None:
    points = equation.domain.points(20, 9, 5, seed=0, dtype=torch.float64)
    field = equation.problem(replace(TINY, seed=3)).solution
    assert field is not None
    inside = equation.residuals(field, points)[0]
    x, t = (coordinate.detach() for coordinate in points.interior)
    torch.testing.assert_close(inside.detach(), by_differences(equation.name, field, x, t), rtol=1e-4, atol=1e-6)


def by_differences(name: str, u, x: Tensor, t: Tensor, h: float = 1e-4) -> Tensor:
    """The equations once more, by central differences."""
    with torch.no_grad():
        v = u(x, t)
        v_x, v_t = (u(x + h, t) - u(x - h, t)) / (2 * h), (u(x, t + h) - u(x, t - h)) / (2 * h)
        v_xx = (u(x + h, t) - 2 * v + u(x - h, t)) / h**2
        v_tt = (u(x, t + h) - 2 * v + u(x, t - h)) / h**2
    sines = torch.sin(2 * torch.pi * x) * torch.sin(2 * torch.pi * t)
    tones = torch.sin(torch.pi * x) * torch.sin(4 * torch.pi * t)
    wavy = torch.sin(3 * torch.pi * x) * torch.cos(2 * torch.pi * t) + torch.sin(5 * torch.pi * x * t) / 2
    return {
        "convection": v_t + 40 * v_x,
        "reaction": v_t - 5 * v + 5 * v**2,
        "wave": v_tt - 4 * v_xx,
        "burgers": v_t + v * v_x - 0.01 / torch.pi * v_xx,
        "allen-cahn": v_t - 1e-3 * v_xx + 5 * v**3 - 5 * v,
        "poisson": v_xx + v_tt + 8 * torch.pi**2 * sines,
        "helmholtz": v_xx + v_tt + v + (17 * torch.pi**2 - 1) * tones,
        "regression": v - wavy,
    }[name]


@every_equation
def test_the_loss_is_the_sum_of_mean_squares(equation: Equation) -> None:
    problem = equation.problem(TINY)
    assert problem.residuals is not None
    points = equation.domain.points(40, 9, 5, seed=0, dtype=torch.float64)
    means = [part.square().mean() for part in equation.residuals(problem.solution, points)]
    torch.testing.assert_close(problem.loss(), torch.stack(means).sum())
    torch.testing.assert_close(problem.loss(), sum(part.square().sum() for part in problem.residuals()))


@every_equation
def test_the_error_is_zero_at_the_reference_and_one_at_zero(equation: Equation) -> None:
    assert equation.relative_error(lambda x, t: equation.truth) == 0
    assert equation.relative_error(lambda x, t: torch.zeros_like(x)) == pytest.approx(1)


def test_burgers_has_the_published_slope_at_the_origin() -> None:
    # Basdevant et al. 1986: 152.00516 is the steepest, at t = 1.6037/π.
    h, time = 1e-4, 1.6037 / np.pi
    u = cole_hopf_row(time, h * np.array([-2.0, -1.0, 1.0, 2.0]))
    slope = (u[0] - 8 * u[1] + 8 * u[2] - u[3]) / (12 * h)
    assert slope == pytest.approx(-152.00516, abs=1e-4)


def test_the_quadrature_satisfies_burgers_equation() -> None:
    x = torch.tensor([[-0.7], [-0.2], [0.05], [0.4]], dtype=torch.float64)
    t, h = torch.full_like(x, 0.3), 1e-4

    def u(dx: float, dt: float) -> Tensor:
        return cole_hopf(x + dx, t + dt)

    u_t = (u(0, h) - u(0, -h)) / (2 * h)
    u_x = (u(h, 0) - u(-h, 0)) / (2 * h)
    u_xx = (u(h, 0) - 2 * u(0, 0) + u(-h, 0)) / h**2
    assert (u_t + u(0, 0) * u_x - VISCOSITY * u_xx).abs().max() < 1e-4


def test_allen_cahn_agrees_with_finite_differences_and_an_implicit_solver() -> None:
    coarse, fine = allen_cahn_by_differences(512), allen_cahn_by_differences(1024)
    # Differences are of second order; Richardson's extrapolation takes that error away.
    assert np.abs(spectral_solution()[-1] - (4 * fine - coarse) / 3).max() < 2e-5


def allen_cahn_by_differences(nodes: int) -> np.ndarray:
    """The solution at the end of time, at 257 places."""
    x = np.linspace(-1, 1, nodes + 1)

    def velocity(_: float, u: np.ndarray) -> np.ndarray:
        bend = (u[2:] - 2 * u[1:-1] + u[:-2]) / (2 / nodes) ** 2
        return np.pad(1e-3 * bend + 5 * (u - u**3)[1:-1], 1)

    start = x**2 * np.cos(np.pi * x)
    solution = solve_ivp(velocity, (0, 1), start, method="LSODA", lband=1, uband=1, rtol=1e-9, atol=1e-9)
    return solution.y[:: nodes // 256, -1]


def test_allen_cahn_starts_and_ends_where_it_should() -> None:
    solution = spectral_solution()
    x = np.linspace(-1, 1, 257)
    np.testing.assert_allclose(solution[0], x**2 * np.cos(np.pi * x), atol=1e-12)
    np.testing.assert_array_equal(solution[:, [0, -1]], -1)


def test_allen_cahn_has_its_start_and_ends_by_construction() -> None:
    equation = EQUATIONS["allen-cahn"]
    field = equation.problem(TINY).solution
    assert field is not None
    x, t = equation.domain.grid
    is_given = (t == 0) | (x.abs() == 1)
    assert (field(x, t) - equation.truth)[is_given].abs().max() < 1e-12
    assert (field(x, t) - equation.truth)[~is_given].abs().max() > 0.1


def test_the_sizes_are_those_of_rathore() -> None:
    problem = EQUATIONS["convection"].problem(RATHORE)
    assert problem.size == 81_201
    assert problem.residuals is not None
    assert [len(part) for part in problem.residuals()] == [10_000, 257, 101]


def test_interior_points_lie_on_the_grid_and_are_all_different() -> None:
    domain = EQUATIONS["wave"].domain
    x, t = domain.points(10_000, 257, 101, seed=0, dtype=torch.float64).interior
    nodes = torch.cat([x * 256, t * 100], dim=1)
    assert (nodes - nodes.round()).abs().max() < 1e-9
    assert len(nodes.round().unique(dim=0)) == 10_000
    assert nodes.min(dim=0).values.round().tolist() == [1, 1]
    assert nodes.max(dim=0).values.round().tolist() == [255, 100]


def test_a_seed_gives_a_problem_of_its_own() -> None:
    losses = {float(EQUATIONS["wave"].problem(replace(TINY, seed=seed)).loss().detach()) for seed in (0, 0, 1)}
    assert len(losses) == 2


def test_a_problem_draws_nothing_from_the_global_random_stream() -> None:
    state = torch.random.get_rng_state()
    EQUATIONS["wave"].problem(TINY)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_float32_starts_at_the_same_point() -> None:
    single = EQUATIONS["burgers"].problem(replace(TINY, dtype="float32"))
    double = EQUATIONS["burgers"].problem(TINY)
    assert {p.dtype for p in single.params} == {torch.float32}
    torch.testing.assert_close(single.loss().double(), double.loss(), rtol=1e-4, atol=0)


def test_weights_are_xavier_normal_and_biases_zero() -> None:
    weights = [p for p in EQUATIONS["wave"].problem(RATHORE).params if p.ndim == 2]
    biases = [p for p in EQUATIONS["wave"].problem(RATHORE).params if p.ndim == 1]
    for weight in weights:
        assert float(weight.detach().std()) == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.15)
    assert all((bias == 0).all() for bias in biases)


def test_more_points_than_the_grid_has_are_refused() -> None:
    with pytest.raises(ValueError, match="interior must be from 1 to 25500, got 30000"):
        EQUATIONS["wave"].problem(replace(SMALL, interior=30_000))


def dense_jacobian(residuals: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Row by row, by reverse mode."""
    entries = torch.cat([part.reshape(-1) for part in residuals])
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in entries]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


@every_equation
@pytest.mark.parametrize("limit", [0, 1 << 25])
def test_least_squares_is_the_dense_matrix_of_every_equation(equation: Equation, limit: int) -> None:
    tiny = ProblemConfig(width=4, depth=2, interior=12, initial=5, boundary=3)
    problem = equation.problem(tiny)
    assert problem.residuals is not None
    jacobian = dense_jacobian(problem.residuals(), problem.params)
    matrix = LeastSquares(problem.residuals, problem.params, max_jacobian_size=limit)
    # A border point that two sides share, or a value at both ends, must not spoil the Jacobian in one go.
    assert isinstance(matrix.linearize(), ExplicitLinearized if limit else GraphLinearized)
    product = matrix @ torch.eye(problem.size, dtype=torch.float64)
    torch.testing.assert_close(product, 2 * jacobian.T @ jacobian, rtol=1e-9, atol=1e-9)

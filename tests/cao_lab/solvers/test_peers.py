"""The strongest peers do what their papers say: against exact fractions, dense formulas, scipy and LAPACK."""

from fractions import Fraction
from math import log

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from cao.quasi_newton.dense import broyden_coefficients
from cao_lab.solvers.budget import Budget
from cao_lab.solvers.config import SolveError
from cao_lab.solvers.jacobian import Damped
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.methods.dense import update
from cao_lab.solvers.methods.natural_gradient import NaturalGradient
from cao_lab.solvers.methods.self_scaled import SelfScaledBFGS, SelfScaledBroyden
from cao_lab.solvers.methods.target_ratio import Cosines, Model, count_sketch, longest
from cao_lab.solvers.price import Price
from cao_lab.solvers.solving import solve
from cao_lab.tasks.pde.problem import Problem, least_squares

F = Fraction
SHORT, LONG = (F(1), F(0)), (F(4), F(0))


def exact_update(step: tuple[F, F], share: F, scale: F) -> list[list[float]]:
    """(H − Hy(Hy)ᵀ/yᵀHy + φvvᵀ)/τ + ssᵀ/sᵀy in fractions, for H = diag(1, 3) and y = (3, 1)."""
    inverse, change = [[F(1), F(0)], [F(0), F(3)]], [F(3), F(1)]
    image = [sum((h * y for h, y in zip(row, change, strict=True)), F(0)) for row in inverse]
    along = sum((s * y for s, y in zip(step, change, strict=True)), F(0))
    across = sum((y * hy for y, hy in zip(change, image, strict=True)), F(0))
    v = [s / along - hy / across for s, hy in zip(step, image, strict=True)]  # Without its factor √(yᵀHy).
    return [
        [
            float(
                (inverse[i][j] - image[i] * image[j] / across + share * across * v[i] * v[j]) / scale
                + step[i] * step[j] / along
            )
            for j in range(2)
        ]
        for i in range(2)
    ]


@pytest.mark.parametrize(
    ("method", "step", "share", "scale"),
    [
        (SelfScaledBFGS(), SHORT, F(1), F(1)),  # b = 1/3: H is not too large, and stays.
        (SelfScaledBFGS(), LONG, F(1), F(3, 4)),  # b = 4/3: τ = 1/b.
        # b = 1/3, h = 4, a = 1/3, ρ = 1, θ = 1, σ = 4/3: DFP, scaled by 1/σ.
        (SelfScaledBroyden(), SHORT, F(0), F(3, 4)),
        # b = 4/3, h = 1, ρ = 1/2, θ = −1/4, σ = 11/12: beyond BFGS, scaled by 1/(bσ).
        (SelfScaledBroyden(), LONG, F(15, 11), F(9, 11)),
    ],
)
def test_an_update_is_that_of_the_formula_in_exact_arithmetic(
    method: SelfScaledBFGS, step: tuple[F, F], share: F, scale: F
) -> None:
    inverse, change = np.diag([1.0, 3.0]), np.array([3.0, 1.0])
    moved = np.array([float(part) for part in step])
    method.learn(inverse, moved, change, np.linalg.solve(inverse, moved))
    assert inverse == pytest.approx(np.array(exact_update(step, share, scale)), rel=1e-14, abs=1e-14)
    assert inverse @ change == pytest.approx(moved, abs=1e-14)


def test_without_scaling_the_update_is_that_of_bfgs() -> None:
    generator = np.random.default_rng(0)
    step, noise = generator.normal(size=(2, 6))
    change = 3 * step + 0.1 * noise  # b < 1: nothing is scaled.
    theirs, ours = np.eye(6), np.eye(6)
    update(theirs, step, change)
    SelfScaledBFGS().learn(ours, step, change, step)
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_coefficients_are_those_that_the_library_has_by_itself() -> None:
    for b, h in np.exp(np.random.default_rng(0).uniform(0, 3, size=(50, 2))) * [0.3, 4.0]:
        assert SelfScaledBroyden().choice(b, h, 30) == pytest.approx(broyden_coefficients(b, h, 30), rel=1e-10)


def test_the_matrix_is_made_symmetric_before_scaling_drowns_it() -> None:
    generator, inverse, learn = np.random.default_rng(0), np.eye(40), SelfScaledBroyden().learner()
    for _ in range(50):
        step, noise = generator.normal(size=(2, 40))
        change = 0.5 * step + 0.1 * noise
        assert step @ change > 0
        learn(inverse, step, change, np.linalg.solve(inverse, step))
        assert inverse == pytest.approx(inverse.T, rel=1e-9, abs=1e-9)
    assert np.array_equal(inverse, inverse.T)


def test_a_pair_of_negative_curvature_teaches_nothing() -> None:
    inverse = np.eye(2)
    SelfScaledBroyden().learn(inverse, np.array([1.0, 0.0]), np.array([-1.0, 0.0]), np.array([1.0, 0.0]))
    assert np.array_equal(inverse, np.eye(2))


def fit() -> tuple[Problem, np.ndarray]:
    """An exponential with an offset through noisy points, and what scipy's Levenberg–Marquardt makes of it."""
    x = torch.linspace(0, 2, 12, dtype=torch.float64)
    y = 2 * torch.exp(-1.3 * x) + 0.5 + 0.05 * torch.sin(40 * x)
    theta = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64, requires_grad=True)

    def residuals(point: Tensor) -> Tensor:
        return point[0] * torch.exp(point[1] * x) + point[2] - y

    found = scipy.optimize.least_squares(
        lambda point: residuals(torch.from_numpy(point)).numpy(), theta.detach().numpy(), method="lm", xtol=1e-15
    )
    return least_squares("fit", [theta], lambda: (residuals(theta),)), found.x


@pytest.mark.parametrize("name", ["levenberg-marquardt", "engd-w", "target-ratio", "ssbroyden", "ssbfgs"])
def test_a_small_fit_ends_where_that_of_scipy_does(name: str) -> None:
    problem, expected = fit()
    list(solve(problem, METHODS[name], Budget(300), price=Price(1.0)))
    assert problem.params[0].detach().numpy() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_damped_steps_are_those_of_a_dense_solve(shape: tuple[int, int]) -> None:
    jacobian, right = torch.randn(*shape, dtype=torch.float64), torch.randn(shape[0], dtype=torch.float64)
    normal = jacobian.T @ jacobian + 0.3 * torch.eye(shape[1], dtype=torch.float64)
    step = Damped(jacobian).step(right, 0.3)
    torch.testing.assert_close(step, torch.linalg.solve(normal, jacobian.T @ right))
    assert Damped(torch.zeros(shape, dtype=torch.float64)).step(right, 0.0) is None


def test_momentum_carries_what_the_last_update_left() -> None:
    matrix = torch.tensor([[2.0, 0.0], [0.0, 1e-3]], dtype=torch.float64)
    x = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    problem = least_squares("two", [x], lambda: (matrix @ x - 1,))
    method = NaturalGradient(momentum=0.5, damping=0.1, halvings=0)
    list(solve(problem, method, Budget(3), price=Price(1e-9)))  # The start, and two steps of rate one.
    inverse = torch.linalg.inv(matrix @ matrix + 0.1 * torch.eye(2, dtype=torch.float64))
    first = inverse @ matrix @ (matrix @ torch.ones(2, dtype=torch.float64) - 1)
    there = 1 - first
    second = first / 2 + inverse @ matrix @ (matrix @ there - 1 - matrix @ first / 2)
    losses = [float((matrix @ point - 1).square().sum()) for point in (there, there - second)]
    torch.testing.assert_close(x.detach(), there - second if losses[1] < losses[0] else there)


def test_a_step_of_given_length_is_the_lowest_point_of_its_sphere() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    right = torch.randn(8, dtype=torch.float64, generator=generator)
    model = Model(matrix, right, lambda z: z)
    step = model.step(model.damping(0.1))
    assert float(step.norm()) == pytest.approx(0.1, rel=1e-6)
    slope = matrix.T @ (matrix @ step + right)
    assert float(torch.cosine_similarity(slope, step, dim=0)) == pytest.approx(-1, abs=1e-10)
    promised = float(right.square().sum() - (matrix @ step + right).square().sum())
    loss = float(right.square().sum())
    assert model.ratio(0.1, loss, lambda _: loss - 0.6 * promised) == pytest.approx(0.6, rel=1e-6)
    whole = torch.linalg.lstsq(matrix, -right).solution
    torch.testing.assert_close(model.step(model.damping(1e3)), whole)  # No step is so long.


def test_cosines_are_an_orthonormal_basis() -> None:
    lift = Cosines(12, 5, torch.Generator().manual_seed(0))
    basis = lift.seen(torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64))
    coordinates = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(lift.lifted(coordinates), basis @ coordinates)


def test_a_count_sketch_adds_each_row_once_with_a_sign() -> None:
    rows = torch.eye(20, dtype=torch.float64)
    sketched = count_sketch(rows, 6, torch.Generator().manual_seed(0))
    assert sketched.abs().sum(0).tolist() == [1.0] * 20
    assert sketched.shape == (6, 20)


def test_the_longest_step_is_where_the_running_minimum_crosses() -> None:
    ratios = {1.0: 0.9, 2.0: 0.5, 4.0: 0.1, 8.0: 0.9}
    tried: list[float] = []

    def ratio(length: float) -> float:
        tried.append(length)
        return ratios[length]

    found = longest(list(ratios), ratio, 0.3)
    assert found is not None
    assert log(found) == pytest.approx(log(2) + 0.5 * log(2))
    assert tried == [1.0, 2.0, 4.0]
    assert longest([1.0, 2.0], lambda _: 0.5, 0.3) == 2.0
    assert longest([1.0, 2.0], lambda _: -1.0, 0.3) is None


@pytest.mark.parametrize("name", ["levenberg-marquardt", "target-ratio", "engd-w"])
def test_a_loss_without_residuals_is_refused_by_name(name: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(SolveError, match=f"{name} needs residuals, not a loss alone"):
        list(solve(Problem("plain", [x], lambda: x.square().sum()), METHODS[name], Budget(5), price=Price(1.0)))

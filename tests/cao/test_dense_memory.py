"""The self-scaled dense memory against the paper's update of the Hessian itself, inverted, and what it takes over."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cao import LeastSquares, SketchedLBFGS
from cao.quasi_newton.dense import Dense
from cao.quasi_newton.memory import is_dense_affordable
from cao.quasi_newton.pairs import Pairs

SIZE = 7


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive_matrix(seed: int) -> Tensor:
    factor = draw(SIZE, SIZE, seed=seed)
    return factor @ factor.T + 0.1 * torch.eye(SIZE, dtype=torch.float64)


def updated_hessian(hessian: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """Return B₊ = τ (B − Bssᵀ B/sᵀBs + θ sᵀBs wwᵀ) + yyᵀ/sᵀy with w = y/sᵀy − Bs/sᵀBs, as Al-Baali has it."""
    image, along = hessian @ step, float(step @ change)
    bent = float(step @ image)
    b, h = bent / along, float(change @ torch.linalg.solve(hessian, change)) / along
    a = b * h - 1
    rho = min(1, h * (1 - math.sqrt(a / (a + 1))))
    theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
    sigma = 1 + a * theta
    root = sigma ** (-1 / (SIZE - 1))
    tau = min(1, 1 / b) * min(root, 1 / theta) if theta > 0 else min(min(1, 1 / b) * root, sigma)
    w = change / along - image / bent
    inner = hessian - torch.outer(image, image) / bent + theta * bent * torch.outer(w, w)
    return tau * inner + torch.outer(change, change) / along


def learnt(inverse: Tensor, step: Tensor, change: Tensor) -> Tensor:
    memory = Dense({"dense": inverse.clone()})
    memory.learn(step, change, torch.linalg.solve(inverse, step))
    return memory.matrix


@pytest.mark.parametrize("stretch", [0.01, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("seed", range(8))
def test_an_update_is_the_inverse_of_the_papers_update_of_the_hessian(seed: int, stretch: float) -> None:
    hessian, step = positive_matrix(seed), draw(SIZE, seed=seed + 100)
    change = stretch * positive_matrix(seed + 200) @ step
    found = learnt(torch.linalg.inv(hessian), step, change)
    expected = torch.linalg.inv(updated_hessian(hessian, step, change))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_without_a_reason_to_scale_it_is_bfgs(seed: int) -> None:
    # Where sᵀBs = sᵀy the matrix is as large as it should be along the step: θ = 0, φ = τ = 1.
    hessian, step = positive_matrix(seed), draw(SIZE, seed=seed + 100)
    change = positive_matrix(seed + 200) @ step
    change *= (step @ hessian @ step) / (step @ change)
    inverse, identity = torch.linalg.inv(hessian), torch.eye(SIZE, dtype=torch.float64)
    left = identity - torch.outer(step, change) / (step @ change)
    expected = left @ inverse @ left.T + torch.outer(step, step) / (step @ change)
    torch.testing.assert_close(learnt(inverse, step, change), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_maps_the_last_change_to_its_step_and_stays_symmetric_and_positive(dtype: torch.dtype) -> None:
    memory, matrix = Dense({"dense": torch.eye(SIZE, dtype=dtype)}), positive_matrix(1).to(dtype)
    for step in draw(40, SIZE, seed=2).to(dtype):
        change = matrix @ step
        memory.learn(step, change, torch.linalg.solve(memory.matrix, step))
        error = (memory @ change - step).norm() / step.norm()
        assert error < 1e4 * torch.finfo(dtype).eps
        assert torch.equal(memory.matrix, memory.matrix.T)
        assert float(torch.linalg.eigvalsh(memory.matrix)[0]) > 0


@pytest.mark.parametrize("along", ["its own image", "a change too small to be squared", "a negative curvature"])
def test_what_cannot_be_learnt_changes_nothing_or_no_more_than_rounding(along: str) -> None:
    inverse, step = torch.linalg.inv(positive_matrix(3)), draw(SIZE, seed=4)
    image = torch.linalg.solve(inverse, step)
    change = {"its own image": image, "a negative curvature": -image}.get(along, 1e-170 * image)
    torch.testing.assert_close(learnt(inverse, step, change), inverse, rtol=1e-9, atol=1e-12)


def test_one_parameter_has_one_member_of_the_family() -> None:
    one = torch.ones(1, dtype=torch.float64)
    memory = Dense({"dense": one[:, None].clone()})
    memory.learn(one, 4 * one, one)
    assert float(memory.matrix) == pytest.approx(0.25)


def test_the_first_step_is_where_a_parabola_falls_as_far_as_the_last_one_did() -> None:
    memory = Dense({})
    # t² − 4t has the slope −4 at zero, and its minimum −4 at two.
    assert memory.first_step(5.0, slope=-4.0, decrease=4.0) == pytest.approx(2.0, rel=0.02)
    assert memory.first_step(1.0, slope=-4.0, decrease=4.0) == 1.0
    assert memory.first_step(1.0, slope=-4.0, decrease=0.0) == 1.0


def pairs_over_a_sketch(rank: int, count: int) -> tuple[dict[str, object], Pairs]:
    state: dict[str, object] = {}
    pairs = Pairs(state, 4)
    if rank:
        vectors = torch.linalg.qr(draw(SIZE, rank, seed=5)).Q.T.contiguous()
        pairs.adopt(torch.logspace(3, -3, rank, dtype=torch.float64), vectors)
    for step in draw(count, SIZE, seed=6):
        pairs.learn(step, positive_matrix(7) @ step)
    return state, pairs


@pytest.mark.parametrize("rank", [0, 3, SIZE])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_matrix_takes_over_what_pairs_have_learnt(rank: int, count: int) -> None:
    state, pairs = pairs_over_a_sketch(rank, count)
    unit_vectors = torch.eye(SIZE, dtype=torch.float64)
    expected = torch.stack([pairs @ vector for vector in unit_vectors], dim=1)
    memory = Dense.of(state, pairs)
    torch.testing.assert_close(memory.matrix, expected, rtol=1e-8, atol=1e-8)
    assert not pairs.has_learnt
    assert "steps" not in state


def test_a_matrix_that_is_forgotten_leaves_the_sketch() -> None:
    state, pairs = pairs_over_a_sketch(3, 4)
    Dense.of(state, pairs).forget()
    pairs.learn(draw(SIZE, seed=8), positive_matrix(7) @ draw(SIZE, seed=8))
    _, fresh = pairs_over_a_sketch(3, 0)
    fresh.learn(draw(SIZE, seed=8), positive_matrix(7) @ draw(SIZE, seed=8))
    assert torch.equal(pairs @ draw(SIZE, seed=9), fresh @ draw(SIZE, seed=9))


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])


def solved(memory: Any, has_source: bool, **settings: Any) -> tuple[Tensor, SketchedLBFGS]:
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).requires_grad_()
    source = LeastSquares(lambda: rosenbrock(x), [x]) if has_source else None
    optimizer = SketchedLBFGS([x], source=source, memory=memory, max_iter=1000, max_eval=2000, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rosenbrock(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return x.detach(), optimizer


@pytest.mark.parametrize("has_source", [True, False])
@pytest.mark.parametrize("memory", ["auto", "pairs", "dense"])
def test_every_memory_ends_at_a_minimum_and_says_so(memory: str, has_source: bool) -> None:
    x, optimizer = solved(memory, has_source)
    gradient = torch.autograd.functional.jacobian(lambda x: rosenbrock(x).square().sum(), x)
    assert float(gradient.abs().max()) < 1e-6
    assert optimizer.status.converged


def test_without_sketches_that_could_stop_to_pay_pairs_are_kept() -> None:
    assert solved("auto", has_source=False)[1].status.memory == "pairs"
    assert solved("auto", has_source=True, refresh=50)[1].status.memory == "pairs"


@pytest.mark.parametrize(
    ("size", "residuals", "expected"),
    [(900, 0, True), (5000, 0, False), (5000, 2000, True), (5000, 1000, False), (20_000, 10**6, False)],
)
def test_a_matrix_is_affordable_by_memory_and_by_the_time_of_an_evaluation(
    size: int, residuals: int, expected: bool
) -> None:
    assert is_dense_affordable(size, residuals) == expected

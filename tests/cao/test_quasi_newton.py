"""The inverse Hessian of pairs over a sketch, against BFGS written out with dense matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cao.quasi_newton.pairs import Pairs

SIZE = 9


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sketched(rank: int, capacity: int = 4) -> tuple[Pairs, Tensor]:
    """Return an inverse with a sketch of this rank, and the sketch as a dense matrix."""
    inverse, vectors = Pairs({}, capacity), torch.linalg.qr(draw(SIZE, max(rank, 1))).Q.T[:rank]
    values = torch.logspace(3, -3, rank, dtype=torch.float64)
    if rank:
        inverse.adopt(values, vectors)
    return inverse, vectors.T @ torch.diag(values) @ vectors


def pairs_of(matrix: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return [(step, matrix @ step) for step in draw(count, SIZE, seed=1)]


def positive_matrix() -> Tensor:
    factor = draw(SIZE, SIZE, seed=2)
    return factor @ factor.T


def dense_bfgs(initial: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    inverse, identity = initial, torch.eye(SIZE, dtype=initial.dtype)
    for step, change in pairs:
        left = identity - torch.outer(step, change) / (step @ change)
        inverse = left @ inverse @ left.T + torch.outer(step, step) / (step @ change)
    return inverse


def dense_damped_inverse(sketch: Tensor, damping: float) -> Tensor:
    return torch.linalg.inv(sketch + damping * torch.eye(SIZE, dtype=sketch.dtype))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_product_is_that_of_dense_bfgs_over_the_sketch(count: int, rank: int) -> None:
    inverse, sketch = sketched(rank)
    history = pairs_of(positive_matrix(), count)
    for step, change in history:
        inverse.learn(step, change)
    expected = dense_bfgs(dense_damped_inverse(sketch, inverse.damping), history[-4:])
    torch.testing.assert_close(inverse @ draw(SIZE, seed=3), expected @ draw(SIZE, seed=3), rtol=1e-9, atol=1e-9)


def test_forgotten_pairs_leave_no_trace() -> None:
    (used, _), (new, _) = sketched(2), sketched(2)
    history = pairs_of(positive_matrix(), 8)
    for step, change in history[:5]:
        used.learn(step, change)
    used.forget()
    for inverse in (used, new):
        for step, change in history[5:]:
            inverse.learn(step, change)
    assert torch.equal(used @ draw(SIZE), new @ draw(SIZE))


def test_a_pair_of_negative_curvature_teaches_nothing() -> None:
    inverse, _ = sketched(2)
    inverse.damping = 0.5
    before = inverse @ draw(SIZE)
    inverse.learn(draw(SIZE, seed=4), -draw(SIZE, seed=4))
    assert torch.equal(inverse @ draw(SIZE), before)


def test_without_a_sketch_the_damping_is_the_usual_scaling_by_the_newest_pair() -> None:
    inverse, _ = sketched(0)
    for step, change in pairs_of(positive_matrix(), 3):
        inverse.learn(step, change)
    assert inverse.damping == pytest.approx(float(change @ change / (step @ change)))


def test_the_damping_is_the_curvature_beyond_the_sketch() -> None:
    inverse, sketch = sketched(4)
    for step, change in pairs_of(sketch + 0.02 * torch.eye(SIZE, dtype=torch.float64), 3):
        inverse.learn(step, change)
    assert inverse.damping == pytest.approx(0.02)


def test_the_damped_sketch_explains_all_pairs_since_it_was_adopted() -> None:
    inverse, sketch = sketched(4)
    history = pairs_of(positive_matrix(), 6)
    for step, change in history:
        inverse.learn(step, change)
    steps, changes = (torch.stack(parts) for parts in zip(*history, strict=True))
    dense = dense_damped_inverse(sketch, inverse.damping)
    explained = torch.einsum("ij,jk,ik", changes, dense, changes)
    assert float(explained) == pytest.approx(float((steps * changes).sum()))


def test_a_complete_sketch_is_inverted_whatever_the_damping_was() -> None:
    inverse, sketch = sketched(0)[0], sketched(SIZE)[1]
    inverse.damping = 1e3  # As large as the largest eigenvalue.
    values, vectors = torch.linalg.eigh(sketch)
    inverse.adopt(values, vectors.T.contiguous())
    torch.testing.assert_close(inverse @ draw(SIZE), torch.linalg.solve(sketch, draw(SIZE)), rtol=1e-3, atol=0)
    inverse, _ = sketched(SIZE - 1)
    inverse.damping = 1e3
    inverse.adopt(values[1:], vectors[:, 1:].T.contiguous())
    assert inverse.damping == 1e3  # Which speaks for what this sketch leaves out.


@pytest.mark.parametrize("capacity", [2, 6])
def test_another_capacity_keeps_the_newest_pairs(capacity: int) -> None:
    inverse, sketch = sketched(3)
    history = pairs_of(positive_matrix(), 8)
    for index, (step, change) in enumerate(history):
        inverse.capacity = 4 if index < 7 else capacity
        inverse.learn(step, change)
    kept = history[-min(capacity, 5) :]
    expected = dense_bfgs(dense_damped_inverse(sketch, inverse.damping), kept)
    torch.testing.assert_close(inverse @ draw(SIZE, seed=3), expected @ draw(SIZE, seed=3), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [0, 3, SIZE])
def test_a_pair_is_learnt_by_one_read_from_the_device(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inverse, _ = sketched(rank)
    inverse.learn(*pairs_of(positive_matrix(), 1)[0])
    monkeypatch.setattr("cao.quasi_newton.pairs.damping_that_explains", lambda values, *rest: 1.0)
    reads = []
    for name in ("cpu", "item", "__float__", "__bool__", "__int__"):
        whole = getattr(Tensor, name)

        def read(tensor: Tensor, whole: Callable[[Tensor], object] = whole) -> object:
            # The vector of facts is what was read; it and what is made of it are on the CPU.
            reads.append(tensor.numel())
            return whole(tensor)

        monkeypatch.setattr(Tensor, name, read)
    step, change = pairs_of(positive_matrix(), 2)[1]
    inverse.learn(step, change)
    assert [count for count in reads if count > 1] == [rank + 4]
    assert len(reads) <= 2  # The other one is a sum of facts.
    assert inverse.values.device.type == "cpu"


@pytest.mark.parametrize("rank", [0, 3, SIZE])
def test_a_pair_too_small_to_be_squared_says_nothing_about_the_damping(rank: int) -> None:
    inverse, _ = sketched(rank)
    inverse.damping = 0.5
    inverse.learn(1e-155 * draw(SIZE), 1e-155 * draw(SIZE))
    assert inverse.damping == 0.5

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cao import Damped, Eigenpairs, precondition

RULES = {"magnitude": torch.abs, "clip": lambda values: values.clamp_min(0), "signed": lambda values: values}


def sketch_with(values: list[float], n: int, seed: int = 0) -> Eigenpairs:
    noise = torch.randn(n, len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Eigenpairs(
        torch.tensor(values, dtype=torch.float64), torch.linalg.qr(noise).Q, torch.zeros(len(values)).double()
    )


def dense(sketch: Eigenpairs, damping: float, rule: str) -> Tensor:
    n = sketch.vectors.shape[0]
    return sketch.vectors * RULES[rule](sketch.values) @ sketch.vectors.T + damping * torch.eye(n).double()


@given(
    values=st.lists(st.floats(-50, 50), min_size=0, max_size=5),
    damping=st.floats(1e-3, 10),
    rule=st.sampled_from(["magnitude", "clip"]),
    seed=st.integers(0, 100),
)
def test_preconditioning_solves_the_dense_system(values, damping, rule, seed):
    sketch = sketch_with(values, 8, seed)
    gradient = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.linalg.solve(dense(sketch, damping, rule), gradient)
    torch.testing.assert_close(precondition(gradient, sketch, damping, negative_curvature=rule), expected)
    unit = precondition(gradient, sketch, damping, negative_curvature=rule, scaling="unit")
    torch.testing.assert_close(unit, damping * expected)


def test_the_signed_rule_is_the_papers_formula_and_may_climb():
    sketch = sketch_with([5.0, -3.0], 6)
    gradient = sketch.vectors[:, 1]
    update = precondition(gradient, sketch, 0.5, negative_curvature="signed")
    torch.testing.assert_close(update, torch.linalg.solve(dense(sketch, 0.5, "signed"), gradient))
    assert update @ gradient < 0


@given(values=st.lists(st.floats(-50, 50), min_size=1, max_size=5), damping=st.floats(1e-3, 10))
def test_magnitude_and_clip_always_descend(values, damping):
    sketch = sketch_with(values, 8)
    gradient = torch.linspace(-1, 1, 8, dtype=torch.float64)
    for rule in ("magnitude", "clip"):
        assert precondition(gradient, sketch, damping, negative_curvature=rule) @ gradient > 0


@pytest.mark.parametrize("offset", [0.0, 1e-8, -1e-8])
def test_a_singular_direction_is_left_to_the_complement(offset):
    sketch = sketch_with([-0.1 + offset], 4)
    gradient = torch.ones(4, dtype=torch.float64)
    update = precondition(gradient, sketch, 0.1, negative_curvature="signed")
    torch.testing.assert_close(update, gradient / 0.1)


def test_a_huge_eigenvalue_projects_its_direction_out():
    sketch = sketch_with([1e30], 5)
    gradient = torch.ones(5, dtype=torch.float64)
    update = precondition(gradient, sketch, 0.1, scaling="unit")
    torch.testing.assert_close(update, gradient - sketch.vectors[:, 0] * (sketch.vectors[:, 0] @ gradient))


@pytest.mark.parametrize("rank", [0, 3, 6])
@pytest.mark.parametrize("scaling", ["inverse-damping", "unit"])
def test_the_whole_matrix_is_the_inverse_also_of_a_sketch_of_nothing_and_of_everything(rank, scaling):
    sketch, damping = sketch_with([50.0, 20.0, -8.0, 3.0, 0.5, 0.1][:rank], 6), 0.3
    P = Damped.of(sketch.values, sketch.vectors, damping, scaling=scaling, brake=0.5)
    expected = 0.5 * torch.linalg.inv(dense(sketch, damping, "magnitude")) * (damping if scaling == "unit" else 1)
    torch.testing.assert_close(P.dense(), expected)
    torch.testing.assert_close(P @ torch.eye(6).double(), expected)


def test_rounding_of_the_complement_does_not_drown_a_complete_sketch_of_tiny_damping():
    sketch = sketch_with([1e6, 1e3, 1.0], 3)
    gradient = sketch.vectors @ torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    expected = sketch.vectors @ (1 / (sketch.values + 1e-12))
    torch.testing.assert_close(precondition(gradient, sketch, 1e-12), expected, rtol=1e-8, atol=1e-8)

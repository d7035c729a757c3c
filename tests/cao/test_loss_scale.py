from collections.abc import Callable

import pytest
import torch
from small_models import Quadratic, batch, loss_of, losses_of_parts, smooth_network
from torch import Tensor
from torch.nn.functional import cross_entropy

from cao import CAO, Eigenpairs, GaussNewton

SCALES = [0.25, 65536.0]


def sources(scale: float) -> dict[str, Callable[[], object]]:
    """Return each kind of source, its loss multiplied by the scale."""
    model, data = smooth_network(), batch()
    return {
        "loss": lambda: (model, scale * loss_of(model, data)),
        "function": lambda: (model, lambda: scale * loss_of(model, data)),
        "parts": lambda: (model, lambda: (scale * loss for loss in losses_of_parts(model, data, 4))),
        "gauss-newton": lambda: (
            model,
            GaussNewton(model, data[0], lambda outputs: scale * cross_entropy(outputs, data[1])),
        ),
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["loss", "function", "parts", "gauss-newton"])
def test_the_sketch_is_that_of_the_unscaled_loss(kind, scale):
    sketches = []
    for factor in (1.0, scale):
        model, source = sources(factor)[kind]()
        optimizer = CAO(model.parameters(), 0.1, rank=2)
        assert optimizer.refresh_if_due(source, scale=factor)
        sketches.append(optimizer.sketch)
    plain, scaled = sketches
    assert scaled.values == pytest.approx(plain.values, rel=1e-9)
    assert scaled.residuals == pytest.approx(plain.residuals, rel=1e-6, abs=1e-12)


def test_the_scale_may_be_a_tensor_as_a_gradient_scaler_keeps_it():
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1, rank=2, eigensolver="lanczos")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale(problem.loss())
    optimizer.refresh_if_due(loss, scale=torch.tensor(scaler.get_scale()))
    assert optimizer.sketch.values == pytest.approx([9.0, -4.0])


def test_ready_eigenpairs_are_scaled_too():
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1, rank=1)
    values, residuals = torch.tensor([[8.0], [0.5]], dtype=torch.float64)
    pairs = Eigenpairs(values, torch.eye(6, 1, dtype=torch.float64), residuals)
    optimizer.refresh_if_due(pairs, scale=4.0)
    assert optimizer.sketch.values == [2.0]
    assert optimizer.sketch.residuals == [0.125]


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan, "half", None])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    problem = Quadratic()
    with pytest.raises(ValueError, match=r"scale must be a positive number, got"):
        CAO(problem.params, 0.1).refresh_if_due(problem.loss(), scale=scale)


def test_a_gradient_scaler_and_accumulation_by_hand_take_the_steps_of_neither():
    ends: list[Tensor] = []
    for scale, parts in ((1.0, 1), (1024.0, 2)):
        problem = Quadratic()
        optimizer = CAO(problem.params, 0.02, rank=2, refresh_every=2, damping=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(parts):
                loss = scaler.scale(problem.loss() / parts)
                optimizer.refresh_if_due(loss, scale=scaler.get_scale() / parts)
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(problem.theta)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)

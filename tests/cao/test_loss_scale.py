import warnings
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


def first_step(in_graph: float, in_gradient: float, clip: float | None = None, **settings: float) -> list[str]:
    """Refresh from a loss times one factor, step on the gradient of another multiple, and return the warnings."""
    model = smooth_network()
    optimizer = CAO(model.parameters(), 1e-3, rank=1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = in_graph * loss_of(model, batch())
            optimizer.refresh(loss)
            (in_gradient / in_graph * loss).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "refresh_if_due" in str(each.message)]


@pytest.mark.parametrize(("in_graph", "in_gradient", "scale"), [(65536.0, 1.0, "65536"), (0.25, 1.0, "0.25")])
def test_a_loss_that_was_scaled_without_saying_so_is_noticed_once_with_its_factor(in_graph, in_gradient, scale):
    (message,) = first_step(in_graph, in_gradient)
    assert f"scale={scale} if none was given" in message
    assert "clipped" not in message


def test_a_gradient_that_is_that_of_the_loss_is_not_talked_about():
    assert first_step(1.0, 1.0) == first_step(1.0, 1.5) == []


def test_clipping_is_named_where_it_explains_the_shorter_gradient():
    (message,) = first_step(1.0, 1.0, clip=0.1)
    assert "clipped at a norm of 0.1, nothing is wrong" in message


def test_the_gradient_of_another_batch_is_not_taken_for_a_multiple():
    model = smooth_network()
    optimizer = CAO(model.parameters(), 1e-3, rank=1)
    loss = loss_of(model, batch(seed=0)) / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.refresh(loss)
        (loss + sum(loss_of(model, batch(seed=seed)) / 4 for seed in (1, 2, 3))).backward()
        optimizer.step()


def accumulated_step(factor: float = 1.0, *, scale: float = 1.0, behind: float = 1.0, after: float = 1.0) -> list[str]:
    """Add up the gradients of four batches and return the warnings.

    Each loss is multiplied by a factor, by another behind the refresh's back, and what was added up by one afterwards.
    """
    model = smooth_network()
    optimizer = CAO(model.parameters(), 1e-3, rank=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for part in range(4):
                inputs, _ = batch(100, seed=part)
                loss = factor * loss_of(model, (inputs, (inputs[:, 0] > 0).long()))
                optimizer.refresh_if_due(loss, scale=scale)
                (behind * loss).backward()
            for param in model.parameters():
                param.grad *= after
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "refresh_if_due" in str(each.message)]


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_losses_that_are_added_up_without_saying_so_are_noticed_once(factor):
    (message,) = accumulated_step(factor)
    assert "the gradients of 4 losses were added up" in message
    assert "about 4 times too small. Pass scale=0.25" in message


def test_losses_that_are_added_up_and_told_of_or_averaged_are_not_talked_about():
    assert accumulated_step(0.25, scale=0.25) == accumulated_step(after=0.25) == accumulated_step(behind=0.25) == []


def test_small_parameters_before_large_ones_are_compared_with_their_own_gradients():
    small, large = (torch.linspace(1, 2, size, requires_grad=True) for size in (3, 20_000))
    optimizer = CAO([small, large], 1e-3, rank=1)
    optimizer.refresh(256 * (small.square().sum() + large.square().sum()))
    (small.square().sum() + large.square().sum()).backward()
    with pytest.warns(UserWarning, match="scale=256 if none was given"):
        optimizer.step()

import copy
import math
import random
import warnings
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
from small_models import Attention, Quadratic, batch, loss_of, noisy_network, seeded, smooth_network
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from cao import GaussNewton, Sharpness
from cao.readings import from_file

again = partial(checkpoint, use_reentrant=False)
EXACT = {"budget": None, "tolerance": 1e-9, "max_products": 200}


def dense_hessian(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    names, params = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in params]

    def loss(flat: Tensor) -> Tensor:
        parts = [piece.view_as(p) for piece, p in zip(flat.split(sizes), params, strict=True)]
        return nn.functional.cross_entropy(
            functional_call(model, dict(zip(names, parts, strict=True)), data[0]), data[1]
        )

    return hessian(loss)(torch.cat([p.detach().flatten() for p in params]))


def train(optimizer: Optimizer, watch: Sharpness, model: nn.Module, steps: int) -> None:
    for step in range(steps):
        loss = loss_of(model, batch(16, seed=step))
        optimizer.zero_grad()
        watch(loss)
        loss.backward()
        optimizer.step()


def test_sharpness_and_ratio_under_sgd_are_those_of_the_dense_hessian():
    model, data = smooth_network(), batch(16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
    reading = Sharpness(optimizer, **EXACT)(loss_of(model, data))
    top = float(torch.linalg.eigvalsh(dense_hessian(model, data))[-1])
    assert reading.sharpness == pytest.approx(top, rel=1e-6)
    assert reading.preconditioned == pytest.approx(top + 0.3, rel=1e-6)
    assert reading.ratio == pytest.approx(0.1 * (top + 0.3) / 3.8, rel=1e-6)


def test_the_ratio_under_adamw_is_that_of_the_dense_preconditioned_hessian():
    model, data = smooth_network(), batch(16)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    watch = Sharpness(optimizer, **EXACT)
    train(optimizer, watch, model, 12)
    reading = watch.look(loss_of(model, data))
    state = [optimizer.state[p] for p in model.parameters()]
    squares = torch.cat([own["exp_avg_sq"].flatten() for own in state]) / (1 - 0.999**12)
    felt = torch.linalg.eigvals(dense_hessian(model, data) / (squares.sqrt() + 1e-8).unsqueeze(1)).real.max()
    assert reading.preconditioned == pytest.approx(float(felt), rel=1e-6)
    assert reading.edge == pytest.approx(38 / 0.05 * (1 - 0.9**13))
    assert reading.ratio == pytest.approx(reading.preconditioned / reading.edge)
    assert reading.sharpness == pytest.approx(float(torch.linalg.eigvalsh(dense_hessian(model, data))[-1]), rel=1e-6)


def test_groups_with_rates_and_momenta_of_their_own_lose_their_stability_where_the_ratio_is_one():
    problem = Quadratic((9.0, 4.0, 2.0, 1.0, 0.5, 0.25), sizes=(2, 4))

    def build(rate: float) -> Optimizer:
        first, second = (p.detach().clone().requires_grad_() for p in problem.params)
        return SGD([{"params": [first], "lr": rate, "momentum": 0.9}, {"params": [second], "lr": rate / 3}], lr=1.0)

    def last_length(rate: float) -> float:
        optimizer = build(rate)
        params = [group["params"][0] for group in optimizer.param_groups]
        for _ in range(3_000):
            theta = torch.cat(params).detach()
            for param, piece in zip(params, (problem.matrix @ theta).split([2, 4]), strict=True):
                param.grad = piece
            optimizer.step()
        return float(torch.cat(params).detach().norm())

    optimizer = build(0.1)
    theta = torch.cat([group["params"][0] for group in optimizer.param_groups])
    edge = 0.1 / Sharpness(optimizer, **EXACT)(theta @ problem.matrix @ theta / 2).ratio
    assert last_length(0.99 * edge) < 1e-3
    assert not last_length(1.01 * edge) < 1e3


def test_a_look_touches_nothing():
    model, data = noisy_network(), batch(16)
    optimizer = AdamW(model.parameters(), lr=0.05)
    watch = Sharpness(optimizer, budget=None)
    train(optimizer, watch, model, 12)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    watch.look(lambda: loss_of(model, data))
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert (streams[2] == numpy.random.get_state()[1]).all()


@pytest.mark.parametrize("source", ["loss", "function"])
def test_training_with_looks_takes_the_steps_of_training_without(source):
    ends = []
    for is_watched in (True, False):
        model = noisy_network()
        torch.manual_seed(0)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        watch = Sharpness(optimizer, budget=None)
        for step in range(5):
            data = batch(16, seed=step)
            loss = loss_of(model, data)
            optimizer.zero_grad()
            if is_watched:
                assert watch(loss if source == "loss" else lambda model=model, data=data: loss_of(model, data))
            loss.backward()
            optimizer.step()
        ends.append(model.state_dict())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_every_source_of_a_refresh_gives_the_same_curvature():
    model, data = smooth_network(), batch(16)

    def sharpness(source: object, scale: float = 1.0) -> float:
        watch = Sharpness(SGD(model.parameters(), lr=0.1), **EXACT)
        return watch(source, scale=scale).sharpness

    expected = sharpness(loss_of(model, data))
    parts = [tuple(each[half::2] for each in data) for half in (0, 1)]
    assert sharpness(lambda: loss_of(model, data)) == pytest.approx(expected)
    assert sharpness(lambda: (loss_of(model, part) for part in parts)) == pytest.approx(expected)
    assert sharpness(1024 * loss_of(model, data), scale=1024.0) == pytest.approx(expected)
    gauss_newton = GaussNewton(model, data[0], lambda outputs: nn.functional.cross_entropy(outputs, data[1]))
    assert 0 < sharpness(gauss_newton) != pytest.approx(expected)


def test_autocast_finds_the_curvature_to_its_own_precision():
    model, data = smooth_network(torch.float32), batch(16, dtype=torch.float32)
    expected = float(torch.linalg.eigvalsh(dense_hessian(model, data))[-1])
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, data)
    reading = Sharpness(SGD(model.parameters(), lr=0.1), **{**EXACT, "tolerance": 1e-3})(loss)
    assert reading.sharpness == pytest.approx(expected, rel=0.02)


def test_checkpointed_layers_and_fused_attention_have_the_curvature_of_plain_ones():
    def sharpness(build: Callable[[], nn.Module], is_function: bool) -> float:
        model, data = seeded(build), batch(8, 4, 3)
        source = (lambda: loss_of(model, data)) if is_function else loss_of(model, data)
        return Sharpness(SGD(model.parameters(), lr=0.1), **EXACT)(source).sharpness

    with sdpa_kernel(SDPBackend.MATH):
        expected = sharpness(Attention, is_function=False)
        assert sharpness(lambda: Attention(checkpoint=again), is_function=False) == pytest.approx(expected)
    assert sharpness(lambda: Attention(checkpoint=again), is_function=True) == pytest.approx(expected)


def test_a_warm_look_takes_one_product_and_follows_the_curvature():
    problem = Quadratic((9.0, 4.0, 2.0, 1.0, 0.5, 0.25))
    optimizer = SGD(problem.params, lr=0.1)
    watch = Sharpness(optimizer, budget=None)
    products = []
    for step in range(20):
        factor = 1 + step / 10
        products.append(watch(factor * problem.loss()).products)
        assert watch.readings[-1].sharpness == pytest.approx(9 * factor, rel=0.02)
        optimizer.step()
    assert products[0] > 1
    assert products[3:] == [1] * 17


def test_a_direction_that_becomes_the_sharpest_is_found():
    params = [torch.ones(2, dtype=torch.float64, requires_grad=True)]
    optimizer = SGD(params, lr=0.1)
    watch = Sharpness(optimizer, budget=None)
    for step in range(120):
        curvatures = torch.tensor([1.0, 2.0] if step >= 60 else [1.0, 0.1], dtype=torch.float64)
        watch((curvatures * params[0].square()).sum() / 2)
        optimizer.step()
        if step == 59:
            assert watch.readings[-1].sharpness == pytest.approx(1, rel=1e-3)
    assert watch.readings[-1].sharpness == pytest.approx(2, rel=0.01)


def test_looks_keep_to_their_budget(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cao.watch.Clock._now", lambda clock: now[0])
    problem = Quadratic()
    optimizer = SGD(problem.params, lr=1e-3)
    watch = Sharpness(optimizer, budget=0.05)

    def loss() -> Tensor:  # A look at one product takes two steps' time.
        now[0] += 2
        return problem.loss()

    for _ in range(2_000):
        watch(loss)
        optimizer.zero_grad()
        problem.loss().backward()
        optimizer.step()
        now[0] += 1
    assert 0.04 < watch.share <= 0.05
    assert watch.readings[-1].share <= 0.05
    assert len(watch.readings) > 30
    watch.leave_out(0.5 * 2_000)
    assert watch.share > 0.07


def test_looks_are_as_far_apart_as_they_were_asked_to_be():
    problem = Quadratic()
    optimizer = SGD(problem.params, lr=1e-3)
    watch = Sharpness(optimizer, every=7, budget=None)
    for _ in range(30):
        loss = problem.loss()
        watch(loss)
        watch(loss)  # Another micro-batch of the same step.
        optimizer.step()
    assert [reading.step for reading in watch.readings] == [0, 7, 14, 21, 28]


def test_an_unknown_optimizer_is_watched_plainly_and_says_so():
    class Strange(SGD):
        def step(self, closure=None):
            return super().step(closure)

    problem = Quadratic()
    with pytest.warns(UserWarning, match="the edge of stability of Strange is not known"):
        watch = Sharpness(Strange(problem.params, lr=0.1), **EXACT)
    reading = watch(problem.loss())
    assert reading.sharpness == pytest.approx(9)
    assert math.isnan(reading.ratio)
    told = Sharpness(Strange(problem.params, lr=0.1), like="SGD", **EXACT)(problem.loss())
    assert told.ratio == pytest.approx(0.45)


def test_between_looks_the_ratio_follows_the_learning_rate():
    problem = Quadratic()
    optimizer = SGD(problem.params, lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 2.0**step)
    watch = Sharpness(optimizer, every=100, **EXACT)
    watch(problem.loss())
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert watch.ratio == pytest.approx(8 * 0.45)


def test_a_ratio_that_stays_above_one_is_warned_of_once():
    problem = Quadratic()
    optimizer = SGD(problem.params, lr=0.5)
    watch = Sharpness(optimizer, every=10, budget=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(100):
            watch(problem.loss())
            optimizer.step()
    (warning,) = caught
    assert "has been above the edge of stability for 40 steps, by a factor of 2.25" in str(warning.message)
    assert "Divide lr by 2.2" in str(warning.message)


def test_a_watch_that_is_saved_and_loaded_goes_on_as_if_nothing_had_happened(tmp_path):
    model = smooth_network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    watch = Sharpness(optimizer, every=3, budget=None)
    train(optimizer, watch, model, 20)
    torch.save((model.state_dict(), optimizer.state_dict(), watch.state_dict()), tmp_path / "checkpoint")
    weights, state, watched = torch.load(tmp_path / "checkpoint")
    other = smooth_network()
    other.load_state_dict(weights)
    again = AdamW(other.parameters(), lr=0.01)
    again.load_state_dict(state)
    resumed = Sharpness(again, every=3, budget=None)
    resumed.load_state_dict(watched)
    train(optimizer, watch, model, 10)
    train(again, resumed, other, 10)
    assert [r[:8] for r in resumed.readings] == [r[:8] for r in watch.readings]


def test_readings_reach_functions_loggers_and_files(tmp_path):
    class Run:
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def log(self, numbers: dict[str, float]) -> None:
            self.seen.append(numbers)

    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

    problem, run, writer, told = Quadratic(), Run(), Writer(), []
    optimizer = SGD(problem.params, lr=0.1)
    places = [run, writer, told.append, tmp_path / "watch.csv", str(tmp_path / "logs" / "watch.jsonl")]
    watch = Sharpness(optimizer, budget=None, tell=places)
    for _ in range(3):
        watch(problem.loss())
        optimizer.step()
    assert told == watch.readings
    assert [each["watch/ratio"] for each in run.seen] == [reading.ratio for reading in told]
    assert ("watch/sharpness", told[2].sharpness, 2) in writer.seen
    assert from_file(tmp_path / "watch.csv") == from_file(tmp_path / "logs" / "watch.jsonl") == told
    assert watch.line() == str(told[-1])
    assert "0.4" in watch.line()


def test_a_plot_shows_curvature_edge_ratio_and_rate():
    problem = Quadratic()
    optimizer = SGD(problem.params, lr=0.1)
    watch = Sharpness(optimizer, budget=None)
    for _ in range(3):
        watch(problem.loss())
        optimizer.step()
    above, below, rate = watch.plot().axes
    assert above.lines[0].get_ydata().tolist() == [reading.preconditioned for reading in watch.readings]
    assert above.lines[1].get_ydata().tolist() == pytest.approx([20.0] * 3)
    assert below.lines[0].get_ydata().tolist() == [reading.ratio for reading in watch.readings]
    assert rate.lines[0].get_ydata().tolist() == [0.1] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every and max_products must be at least 1, got 0 and 8"),
        ({"budget": 0.0}, "budget must be a share of the time"),
        ({"like": "Muon"}, "like must be one of SGD, Adam"),
        ({"tell": 3}, "tell takes functions"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sharpness(SGD(Quadratic().params, lr=0.1), **settings)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="Sharpness needs an optimizer of torch, got Linear"):
        Sharpness(nn.Linear(1, 1))

"""Points that grow while they are overfitted, and an optimizer that is told that its loss has changed."""

import io
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_models import flat_params
from torch import Tensor, nn

from cao import GrowingPoints, LeastSquares, SketchedLBFGS


def draw(n: int, seed: int) -> Tensor:
    return torch.rand(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int = 100) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [layer for pair in pairwise([1, 10, 10]) for layer in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(10, 1)).double()


def wave(x: Tensor) -> Tensor:
    return torch.sin(14 * x)


class Fit:
    """A network of 141 parameters that learns a wave from a few points of it, at first."""

    def __init__(self, **settings: Any) -> None:
        self.model = network()
        self.source = GrowingPoints(
            lambda x: self.model(x) - wave(x), self.model.parameters(), draw, **{"count": 10, **settings}
        )
        self.optimizer = SketchedLBFGS(self.model.parameters(), source=self.source)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.source.loss()
        loss.backward()
        return loss

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.step(self.closure)
            if self.source.grow():
                self.optimizer.resampled()

    @torch.no_grad()
    def error(self) -> float:
        x = torch.linspace(0, 1, 501, dtype=torch.float64)[:, None]
        return float((self.model(x) - wave(x)).norm() / wave(x).norm())


def test_more_points_lower_the_error_where_few_are_overfitted() -> None:
    fixed, growing = Fit(most=10), Fit()
    fixed.steps(8)
    growing.steps(8)
    assert fixed.source.count == 10
    assert growing.source.count >= 40
    assert growing.error() < 0.05
    assert fixed.error() > 0.5
    *_, last = fixed.source.comparisons
    assert last.held_out > 1e3 * last.fitted


def polynomial(degree: int, noise: float = 0.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Coefficients, and what they leave of a cosine and of noise that belongs to each point."""
    theta = torch.zeros(degree + 1, 1, dtype=torch.float64, requires_grad=True)

    def residuals(x: Tensor) -> Tensor:
        powers = torch.cat([x**power for power in range(degree + 1)], dim=1)
        return powers @ theta - torch.cos(3 * x) - noise * torch.sin(1e7 * x)

    return theta, residuals


def solved(theta: Tensor, source: GrowingPoints) -> SketchedLBFGS:
    optimizer = SketchedLBFGS([theta], source=source)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = source.loss()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
        if source.grow():
            optimizer.resampled()
    return optimizer


def test_nothing_is_drawn_where_held_out_points_are_fitted_as_well() -> None:
    theta, residuals = polynomial(degree=2)
    source = GrowingPoints(residuals, [theta], draw, count=200)
    solved(theta, source)
    assert source.count == 200
    *_, last = source.comparisons
    assert last.held_out < 1.5 * last.fitted


def test_points_grow_until_there_are_a_few_for_each_parameter_whatever_the_noise_is() -> None:
    # A linear fit of eight parameters: held out over fitted is (m + 8)/(m − 8), which is 9 at ten and 1.2 at a hundred.
    theta, residuals = polynomial(degree=7, noise=0.1)
    source = GrowingPoints(residuals, [theta], draw, count=10)
    solved(theta, source)
    assert 20 <= source.count <= 80
    assert source.comparisons[0].points == 10


def test_the_loss_is_the_mean_square_whatever_the_number_of_points() -> None:
    theta, residuals = polynomial(degree=1)
    for count in (10, 1000):
        source = GrowingPoints(residuals, [theta], draw, count=count)
        assert source.loss().item() == pytest.approx(float(residuals(draw(count, 1)).square().mean()))
        torch.testing.assert_close(source.residuals().square().sum(), source.loss())


def test_several_tensors_grow_together_and_stay_open_to_differentiation() -> None:
    def sides(n: int, seed: int) -> tuple[Tensor, Tensor]:
        return draw(n, seed).requires_grad_(), draw(n // 5, seed + 100)

    theta = torch.ones((), dtype=torch.float64, requires_grad=True)

    def residuals(points: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inside, border = points
        (slope,) = torch.autograd.grad((theta * inside**2).sum(), inside, create_graph=True)
        return slope - inside, 0 * theta * border

    source = GrowingPoints(residuals, [theta], sides, count=20, factor=1 + 1e-12, most=40)
    source.grow()
    source.grow()
    inside, border = source.points
    assert (len(inside), len(border)) == (40, 8)
    assert torch.equal(inside, torch.cat([draw(20, 1), draw(20, 2)]))
    expected = source.residuals()
    assert torch.equal(expected[:40], ((2 * theta * inside - inside) / 40**0.5).reshape(-1))


def test_a_saved_run_resumes_bit_for_bit_after_points_were_added() -> None:
    one, other = Fit(), Fit()
    one.steps(4)
    assert one.source.count > 10
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (one.model, one.optimizer, one.source)], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for each, state in zip((other.model, other.optimizer, other.source), saved, strict=True):
        each.load_state_dict(state)
    one.steps(2)
    other.steps(2)
    assert torch.equal(flat_params(one.model), flat_params(other.model))
    assert one.source.comparisons == other.source.comparisons


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be a positive integer, got 0"),
        ({"factor": 1.0}, r"factor must be larger than 1, got 1\.0"),
        ({"draw": None}, "draw must be a function of a number and a seed, got NoneType"),
        ({"draw": lambda n, seed: draw(n, 7)}, "draw returned the same points for the seeds 0 and 1"),
        ({"draw": lambda n, seed: None}, r"draw\(1000, 0\) must return a tensor with a row for each point"),
        ({"draw": lambda n, seed: [1.0, 2.0]}, r"or several, got \['float', 'float'\]"),
    ],
)
def test_what_cannot_grow_is_refused(settings: dict[str, Any], message: str) -> None:
    theta, residuals = polynomial(degree=1)
    with pytest.raises(ValueError, match=message):
        GrowingPoints(residuals, [theta], **{"draw": draw, **settings})


def test_an_optimizer_that_is_told_of_another_loss_keeps_what_it_knows() -> None:
    model = network()
    points = draw(30, 1)
    source = LeastSquares(lambda: (model(points) - wave(points)) / math.sqrt(len(points)), model.parameters())
    optimizer = SketchedLBFGS(model.parameters(), source=source, max_iter=30, max_eval=100)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = source.residuals().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = optimizer.status
    kept = optimizer._state["vectors"].clone()
    points = draw(200, 2)
    optimizer.resampled()
    assert torch.equal(optimizer._state["vectors"], kept)
    first = source.residuals().square().sum().item()
    calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
    assert calls == optimizer.status.evaluations - before.evaluations
    assert source.residuals().square().sum().item() < first / 2
    assert optimizer.status.contradiction == ()


def test_the_report_shows_both_curves() -> None:
    fit = Fit()
    fit.steps(3)
    rows = fit.optimizer.report().rows
    assert rows["points"].startswith("10 → 20")
    assert rows["mean square"].count("→") == rows["held out"].count("→") == rows["points"].count("→")


def test_overfitted_points_and_residuals_that_more_points_do_not_lower_are_told() -> None:
    fixed = Fit(most=10)
    fixed.steps(5)
    assert "10 points are fitted" in str(fixed.optimizer.report())
    theta, residuals = polynomial(degree=1, noise=0.1)
    report = str(solved(theta, GrowingPoints(residuals, [theta], draw, count=50)).report())
    assert "and at points held out" in report


def test_chunks_of_points_change_nothing_but_the_memory() -> None:
    whole, parts = Fit(count=100), Fit(count=100, chunk=30)
    for _ in range(2):
        for each in (whole, parts):
            each.optimizer.zero_grad()
        torch.testing.assert_close(parts.source.backward(), whole.source.backward())
        torch.testing.assert_close(
            torch.cat([p.grad.reshape(-1) for p in parts.source.params]),  # type: ignore[union-attr]
            torch.cat([p.grad.reshape(-1) for p in whole.source.params]),  # type: ignore[union-attr]
        )
        columns = torch.eye(141, dtype=torch.float64)
        torch.testing.assert_close(parts.source @ columns, whole.source @ columns)
        for each in (whole, parts):
            each.source.factor = 1 + 1e-9
            assert each.source.grow()
    assert parts.source.comparisons[0] == pytest.approx(whole.source.comparisons[0])


def test_points_in_chunks_are_fitted() -> None:
    fit = Fit(count=100, chunk=30)
    first = float(fit.source.loss().detach())
    fit.steps(4)
    assert float(fit.source.loss().detach()) < first / 10
    assert fit.optimizer.status.refreshes > 0


def test_corrected_steps_end_where_points_have_grown_beyond_a_chunk() -> None:
    fit = Fit(count=20, chunk=30, most=40)
    fit.steps(4)
    steps, count = fit.optimizer.status.corrected_steps, fit.source.count
    assert count == 40
    fit.steps(2)
    assert fit.optimizer.status.corrected_steps == steps
    assert math.isinf(fit.optimizer._finish.price)

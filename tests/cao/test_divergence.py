"""Rates and dampings at which training diverges: a warning at the first refresh, or a damping that prevents it."""

import warnings
from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from small_models import Quadratic, descend, seeded, step_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from cao import CAO, GaussNewton


def regression() -> tuple[nn.Module, Callable[[], Tensor], Tensor]:
    """Return a linear model on normal inputs, its loss, and the eigenvalues of 2/N XᵀX with a column for the bias."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 10, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(10, 1, generator=generator, dtype=torch.float64)
    model = seeded(lambda: nn.Linear(10, 1))
    columns = torch.cat([inputs, torch.ones(64, 1, dtype=torch.float64)], dim=1)
    values = torch.linalg.eigvalsh(2 / 64 * columns.T @ columns)
    return model, lambda: mse_loss(model(inputs), targets), values.flip(0)


EXACT = {"eigensolver": "lanczos", "power_iterations": 11}


@pytest.mark.parametrize(
    ("settings", "rate_of_complement"),
    [
        ({"lr": 0.1, "damping": 0.1}, 1.0),
        ({"lr": 0.1, "damping": 0.1, "rank": 3}, 1.0),
        ({"lr": 1.0, "damping": 0.1, "scaling": "unit"}, 1.0),
        ({"lr": 0.2, "damping": 0.1, "momentum": 0.5}, 2.0),
    ],
)
def test_a_rate_beyond_the_edge_outside_the_sketch_warns_once_with_the_figure_and_the_remedy(
    settings, rate_of_complement
):
    model, loss, values = regression()
    optimizer = CAO.paper(model.parameters(), **settings, **EXACT)
    smallest = float(values[settings.get("rank", 1) - 1])
    figure = rate_of_complement * smallest
    assert figure > 2 * (1 + settings.get("momentum", 0.0))
    with pytest.warns(UserWarning, match=rf"{figure:.3g}.*(lr|damping)"):
        optimizer.refresh(loss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.refresh(loss())


def test_a_rate_beyond_the_edge_in_a_captured_direction_warns():
    model, loss, values = regression()
    figure = 2.5 * float(values[0] / (values[0] + 10.0 * values[0]))
    assert figure < 2
    quiet = CAO.paper(model.parameters(), 2.5, damping=10.0 * float(values[0]), **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.refresh(loss())
    loud = CAO.paper(model.parameters(), 2.5, damping=float(values[0]) / 10, **EXACT)
    with pytest.warns(UserWarning, match=r"(lr|damping)"):
        loud.refresh(loss())


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "damping": 0.5},
        {"lr": 0.1, "damping": 0.1, "rank": 11, "momentum": 0.9},
        {"lr": 0.3, "damping": 0.1, "scaling": "unit"},
        {"lr": 1.0, "damping": "auto", "rank": 3},
    ],
)
def test_rates_within_the_edge_are_silent_and_converge(settings):
    model, loss, _ = regression()
    optimizer = CAO.paper(model.parameters(), **settings, **EXACT)
    before = loss().item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            step_on(loss(), optimizer)
    assert loss().item() < 0.1 * before


def digits_problem() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    images, labels = (torch.tensor(array[:400]) for array in load_digits(return_X_y=True))
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), torch.float32)
    return model, images.float() / 16, lambda outputs: cross_entropy(outputs, labels)


def losses_with_automatic_damping(rank: int, kind: str, **settings) -> list[float]:
    model, images, loss_of_outputs = digits_problem()
    optimizer = CAO.paper(model.parameters(), 1.0, rank=rank, refresh_every=10, damping="auto", **settings)
    losses = []
    for _ in range(40):
        loss = loss_of_outputs(model(images))
        optimizer.zero_grad()
        optimizer.refresh_if_due(GaussNewton(model, images, loss_of_outputs) if kind == "gauss-newton" else loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("rank", [10, 20])
def test_automatic_damping_trains_a_network_on_digits(rank):
    losses = losses_with_automatic_damping(rank, "hessian")
    assert max(losses) < 1.5 * losses[0]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("rank", [20, 60])
def test_automatic_damping_with_gauss_newton_does_not_diverge(rank):
    losses = losses_with_automatic_damping(rank, "gauss-newton", power_iterations=1)
    # A step that overshot is seen once, before it is taken back.
    assert max(losses) < 5 * losses[0]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("solver", [{}, {"eigensolver": "lanczos", "power_iterations": 6}])
def test_automatic_damping_solves_a_singular_problem_with_weight_decay(solver):
    problem = Quadratic((4.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    expected = torch.linalg.solve(problem.matrix + 1e-3 * torch.eye(6, dtype=torch.float64), -problem.slope)
    optimizer = CAO.paper(problem.params, 1.0, rank=3, damping="auto", weight_decay=1e-3, refresh_every=5, **solver)
    torch.testing.assert_close(descend(problem, optimizer, 30), expected, rtol=1e-4, atol=1e-3)


def test_automatic_damping_solves_a_singular_problem_in_float32():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 6, generator=generator)
    theta = torch.zeros(6, requires_grad=True)
    optimizer = CAO.paper([theta], 1.0, rank=3, damping="auto", refresh_every=5)
    for _ in range(30):
        step_on((inputs @ theta - torch.tensor([1.0, -2.0])).square().sum(), optimizer)
    expected = torch.linalg.pinv(inputs) @ torch.tensor([1.0, -2.0])
    torch.testing.assert_close(theta.detach(), expected, rtol=1e-3, atol=1e-3)


def test_a_warning_points_at_the_user_s_line_through_the_loop_of_another_package():
    model, loss, _ = regression()
    optimizer = CAO.paper(model.parameters(), 0.1, damping=0.1, **EXACT)
    loop = {"__name__": "lightning.pytorch.loops", "optimizer": optimizer, "loss": loss()}
    exec("def fit():\n    optimizer.refresh(loss)\n", loop)
    with pytest.warns(UserWarning, match="edge of stability") as warned:
        loop["fit"]()
    assert warned[0].filename == __file__

"""Rates and dampings at which training diverges: a warning at the first refresh, or a damping that prevents it."""

import warnings
from collections.abc import Callable

import pytest
import torch
from small_models import fixed, seeded, step_on
from torch import Tensor, nn
from torch.nn.functional import mse_loss


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
    optimizer = fixed(model.parameters(), **settings, **EXACT)
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
    quiet = fixed(model.parameters(), 2.5, damping=10.0 * float(values[0]), **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.refresh(loss())
    loud = fixed(model.parameters(), 2.5, damping=float(values[0]) / 10, **EXACT)
    with pytest.warns(UserWarning, match=r"(lr|damping)"):
        loud.refresh(loss())


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "damping": 0.5},
        {"lr": 0.1, "damping": 0.1, "rank": 11, "momentum": 0.9},
        {"lr": 0.3, "damping": 0.1, "scaling": "unit"},
        {"lr": 1.0, "damping": "auto", "rank": 3, "scaling": "unit"},
    ],
)
def test_rates_within_the_edge_are_silent_and_converge(settings):
    model, loss, _ = regression()
    optimizer = fixed(model.parameters(), **settings, **EXACT)
    before = loss().item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            step_on(loss(), optimizer)
    assert loss().item() < 0.1 * before


def test_a_warning_points_at_the_user_s_line_through_the_loop_of_another_package():
    model, loss, _ = regression()
    optimizer = fixed(model.parameters(), 0.1, damping=0.1, **EXACT)
    loop = {"__name__": "lightning.pytorch.loops", "optimizer": optimizer, "loss": loss()}
    exec("def fit():\n    optimizer.refresh(loss)\n", loop)
    with pytest.warns(UserWarning, match="edge of stability") as warned:
        loop["fit"]()
    assert warned[0].filename == __file__

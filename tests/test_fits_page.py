"""The recipes of docs/fits.md are run as they stand, and find what they should."""

import math
import re
from pathlib import Path

import pytest
import torch

import cao

PAGE = (Path(__file__).parents[1] / "docs/fits.md").read_text()
SECTIONS = dict(re.findall(r"^#+ (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def carried_out(title: str) -> dict[str, object]:
    """Run the code of a section."""
    names: dict[str, object] = {"torch": torch, "cao": cao}
    with torch.random.fork_rng():
        for code in re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL):
            exec(code, names)
    return names


def test_every_recipe_is_run_here():
    titles = {title for title, body in SECTIONS.items() if "```python" in body}
    tested = set(re.findall(r'carried_out\("(.*?)"\)', Path(__file__).read_text()))
    assert titles == tested


def test_the_first_example(capsys):
    names = carried_out("Fits: coefficients, networks, or both")
    assert names["found"].converged
    assert names["k"].item() == pytest.approx(1.3, abs=0.02)
    assert "k " in capsys.readouterr().out


def test_positive_coefficients():
    names = carried_out("Coefficients that must be positive")
    assert names["found"].converged
    assert bool((names["x"] >= 0).all())
    gradient = names["matrix"].T @ (names["matrix"] @ names["x"].detach() - names["target"])
    free = names["x"].detach() > 0
    assert gradient[free].abs().sum() < 1e-10
    assert bool((gradient[~free] >= -1e-10).all())


def test_noisy_data():
    names = carried_out("Noisy data, and when to stop")
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    error = (names["net"](x) - torch.sin(3 * x)).detach().square().mean().sqrt()
    assert error < 0.15


def test_outliers():
    names = carried_out("Outliers")
    torch.testing.assert_close(names["line"].detach(), torch.tensor([2.0, 1.0]).double(), atol=0.05, rtol=0)


def test_uncertainty():
    names = carried_out("How certain is it?")
    assert 0.01 < names["error"].item() < 1
    assert abs(names["jump"].item() - 2) < 4 * names["error"].item()


def test_several_data_sets():
    names = carried_out("Several data sets")
    assert names["rate"].item() == pytest.approx(1.5, abs=0.01)
    assert names["height"].item() == pytest.approx(4, abs=0.3)
    assert names["errors"]["rate"] < 0.01 < names["errors"]["height"]


def test_a_differential_equation():
    names = carried_out("Differential equations with unknown coefficients")
    assert names["growth"].item() == pytest.approx(1.2, abs=0.02)
    assert names["capacity"].item() == pytest.approx(2.0, abs=0.02)


def test_an_operator():
    names = carried_out("Operators: DeepONet")
    assert names["found"].method == "sketched-lbfgs"
    assert names["found"].loss < 1e-3 * names["outputs"].square().sum()


def test_deep_ritz_and_its_trap():
    names = carried_out("Deep Ritz, and its quadrature trap")
    minimum = -(math.pi**2) / 4
    assert names["found"].loss == pytest.approx(minimum, abs=1e-3)
    assert names["gap"].item() < 1e-3
    energy = names["energy"]
    trapped = cao.fit(lambda: energy(4), names["net"].parameters(), max_evaluations=200)
    assert trapped.loss < 2 * minimum < energy(3_001).item()

"""The recipes that need no other package are run as they stand; for the others there are examples."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from cao import CAO, GaussNewton

PAGE = (Path(__file__).parents[1] / "docs/recipes.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PLAIN = [title for title, body in SECTIONS.items() if "cao.integrations" not in body] + ["Watch it"]


@pytest.fixture(autouse=True)
def group_of_one(tmp_path) -> Iterator[None]:
    """Make the process group that recipes for several processes take for granted."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def situation() -> dict[str, object]:
    """Return what the recipes take for granted: a model, its data, and an optimizer with a gradient and a sketch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    loader = [(torch.randn(64, 3), torch.randint(2, (64,))) for _ in range(4)]
    optimizer = CAO(model.parameters(), lr=0.05, refresh_every=2, damping=0.5)
    inputs, targets = loader[0]
    loss = cross_entropy(model(inputs), targets)
    optimizer.refresh_if_due(loss)
    loss.backward()
    names = {"model": model, "loader": loader, "optimizer": optimizer, "inputs": inputs, "targets": targets}
    return {
        **names,
        "loss_function": cross_entropy,
        "GaussNewton": GaussNewton,
        "torch": torch,
        "contextlib": contextlib,
        "parts": 2,
    }


@pytest.mark.parametrize("title", PLAIN)
def test_a_recipe_runs_as_it_stands(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = situation()
    before = [p.clone() for p in names["model"].parameters()]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*|.*torch.cuda.amp.*")
        for code in re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL):
            exec(code, names)
    takes_steps = "optimizer.step()" in SECTIONS[title] or "scaler.step(optimizer)" in SECTIONS[title]
    is_moved = any(not torch.equal(p, q) for p, q in zip(before, names["model"].parameters(), strict=True))
    assert is_moved == takes_steps


@pytest.mark.parametrize("name", sorted(set(re.findall(r"examples/\w+\.py", PAGE))))
def test_a_program_that_a_recipe_names_is_there(name):
    assert (Path(__file__).parents[1] / name).exists()

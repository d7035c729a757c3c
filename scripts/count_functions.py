"""Count what a reader meets: functions and modules of a step with a refresh, lines, arguments of CAO."""

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from cao import CAO, LeastSquares, SketchedLBFGS

SETTINGS: dict[str, Callable[[nn.Module], CAO]] = {
    "default settings, with momentum": lambda model: CAO(model.parameters(), lr=0.01, momentum=0.9),
    # At the paper's rate this loss is too sharp for its damping, and the path would be that of a warning.
    "the paper's settings": lambda model: CAO.paper(model.parameters(), lr=0.001),
}


def functions_called(run: Callable[[], object]) -> dict[str, set[str]]:
    """Return the names of the library's functions that a call passes through, by module."""
    called: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        # Comprehensions and lambdas belong to the function they stand in.
        if event == "call" and module.startswith("cao.") and "<" not in name.split(".")[-1]:
            called[module].add(name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return dict(called)


def step_of_cao(optimizer_for: Callable[[nn.Module], CAO]) -> Callable[[], object]:
    """Return the first step of CAO, which refreshes the sketch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer, loss = optimizer_for(model), model(torch.ones(2, 3)).square().sum()

    def step() -> None:
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    return step


def iteration_of_lbfgs() -> Callable[[], object]:
    """Return the first iteration of SketchedLBFGS, which refreshes the sketch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(20, 3, dtype=torch.float64)
    source = LeastSquares(lambda: model(inputs) - 1, model.parameters())
    optimizer = SketchedLBFGS(model.parameters(), source=source, max_iter=1, refresh=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(inputs) - 1).square().sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def lines_of(folder: str) -> int:
    """Return the number of lines of the modules in a folder of src."""
    modules = (Path(__file__).parents[1] / "src" / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules)


def main() -> None:
    """Print the count for each setting, and the functions by module."""
    warnings.simplefilter("ignore")
    for folder in ("cao", "cao_lab"):
        sys.stdout.write(f"lines of src/{folder}: {lines_of(folder):,}\n")
    arguments = [each for each in signature(CAO).parameters.values() if each.kind is not each.VAR_KEYWORD]
    sys.stdout.write(f"arguments of CAO: {len(arguments)}\n")
    paths = {f"a step of CAO with {name}": step_of_cao(build) for name, build in SETTINGS.items()}
    for name, run in (paths | {"an iteration of SketchedLBFGS": iteration_of_lbfgs()}).items():
        called = functions_called(run)
        sys.stdout.write(f"{name}: {sum(map(len, called.values()))} functions in {len(called)} modules\n")
        for module, names in sorted(called.items()):
            sys.stdout.write(f"  {module}: {', '.join(sorted(names))}\n")


if __name__ == "__main__":
    main()

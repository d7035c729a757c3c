"""Count what a reader meets: functions and modules of a step with a refresh, lines, arguments of CAO."""

import ast
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from inspect import getsource, signature
from pathlib import Path
from textwrap import dedent
from types import FrameType

import torch
from torch import nn

from cao import CAO, LeastSquares, SketchedLBFGS

SETTINGS: dict[str, Callable[[nn.Module], CAO]] = {
    "default settings, with momentum": lambda model: CAO(model.parameters(), lr=0.01, momentum=0.9),
    # At the paper's rate this loss is too sharp for its damping, and the path would be that of a warning.
    "the paper's settings": lambda model: CAO.paper(model.parameters(), lr=0.001),
}


YOUNGER = (
    "watch.py", "edges.py", "readings.py", "clock.py", "integrations/watching.py", "fitting/", "finishing.py",
    "growing_points.py",
    "quasi_newton/corrected.py", "quasi_newton/dense.py", "quasi_newton/memory.py", "quasi_newton/stopping.py",
    "quasi_newton/agreement.py",
)  # fmt: skip
"""What was added to the two optimizers later: the monitor, fits of a few parameters, what ends a full-batch run."""


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


def lines_of(folder: str, without: Collection[str] = ()) -> int:
    """Return the number of lines of the modules in a folder of src, without some of them."""
    root = Path(__file__).parents[1] / "src" / folder
    names = {path: path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    counted = [path for path, name in names.items() if not any(name.startswith(start) for start in without)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in counted)


def lines_of_body(*functions: Callable[..., object]) -> int:
    """Return the number of lines of functions without their signatures and docstrings."""
    trees = [ast.parse(dedent(getsource(function))).body[0] for function in functions]
    bodies = [tree.body[1:] for tree in trees if isinstance(tree, ast.FunctionDef)]
    return sum((body[-1].end_lineno or 0) - body[0].lineno + 1 for body in bodies)


def main() -> None:
    """Print the count for each setting, and the functions by module."""
    warnings.simplefilter("ignore")
    for folder in ("cao", "cao_lab"):
        sys.stdout.write(f"lines of src/{folder}: {lines_of(folder):,}\n")
    sys.stdout.write(f"lines of src/cao without monitor, fits and finishing parts: {lines_of('cao', YOUNGER):,}\n")
    body = lines_of_body(CAO.refresh_if_due, CAO._refresh, inspect.unwrap(CAO.step))
    sys.stdout.write(f"lines of refresh_if_due and step, with what they call in CAO: {body}\n")
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

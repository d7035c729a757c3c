"""Count the library's functions and modules that one step with a refresh passes through."""

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from cao import CAO

SETTINGS: dict[str, Callable[[nn.Module], CAO]] = {
    "default settings, with momentum": lambda model: CAO(model.parameters(), lr=0.01, momentum=0.9),
    # At the paper's rate this loss is too sharp for its damping, and the path would be that of a warning.
    "the paper's settings": lambda model: CAO.paper(model.parameters(), lr=0.001),
}


def functions_called(optimizer_for: Callable[[nn.Module], CAO]) -> dict[str, set[str]]:
    """Return the names of the functions called, by module, in the first step, which refreshes the sketch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = optimizer_for(model)
    called: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        # Comprehensions and lambdas belong to the function they stand in.
        if event == "call" and module.startswith("cao.") and "<" not in name.split(".")[-1]:
            called[module].add(name)

    loss = model(torch.ones(2, 3)).square().sum()
    sys.setprofile(note)
    try:
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
    finally:
        sys.setprofile(None)
    return dict(called)


def main() -> None:
    """Print the count for each setting, and the functions by module."""
    warnings.simplefilter("ignore")
    for name, optimizer_for in SETTINGS.items():
        called = functions_called(optimizer_for)
        sys.stdout.write(f"{name}: {sum(map(len, called.values()))} functions in {len(called)} modules\n")
        for module, names in sorted(called.items()):
            sys.stdout.write(f"  {module}: {', '.join(sorted(names))}\n")


if __name__ == "__main__":
    main()

"""Count the library's functions and modules that one step with a refresh passes through."""

import sys
import warnings
from collections import defaultdict
from types import FrameType

import torch
from torch import nn

from cao import CAO


def functions_called() -> dict[str, set[str]]:
    """Return the names of the functions called, by module, in one training step that refreshes the sketch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = CAO(model.parameters(), lr=0.01, momentum=0.9)
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
    """Print the count, and the functions by module."""
    warnings.simplefilter("ignore")
    called = functions_called()
    sys.stdout.write(f"{sum(map(len, called.values()))} functions in {len(called)} modules\n")
    for module, names in sorted(called.items()):
        sys.stdout.write(f"  {module}: {', '.join(sorted(names))}\n")


if __name__ == "__main__":
    main()

"""A quadratic whose curvature spans four orders of magnitude: one captured direction is enough to open the throttle.

Run it with `python examples/quadratic.py`; it takes two seconds.
"""

import torch

from cao import CAO

SPECTRUM = torch.tensor([1000.0, 1.0, 0.5, 0.2, 0.1])


def loss_of(point: torch.Tensor) -> torch.Tensor:
    return 0.5 * (SPECTRUM * point.square()).sum()


def steps_to_reach(optimizer_name: str, target: float = 1e-6, limit: int = 20_000) -> int:
    point = torch.nn.Parameter(torch.ones(5))
    optimizer: torch.optim.Optimizer
    if optimizer_name == "CAO":
        optimizer = CAO([point], lr=1.0, rank=1, damping=1.0, refresh_every=50, power_iterations=10)
    else:
        # The largest curvature allows no more than 2/1000; half of that is as good as it gets.
        optimizer = torch.optim.SGD([point], lr=1e-3)
    for step in range(limit):
        loss = loss_of(point)
        if loss < target:
            return step
        optimizer.zero_grad()
        if isinstance(optimizer, CAO):
            optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
    return limit


if __name__ == "__main__":
    for name in ("SGD", "CAO"):
        print(f"{name}: {steps_to_reach(name)} steps to a loss of 1e-6")

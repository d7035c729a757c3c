"""The edge of stability: how sharp the loss gets on digits under SGD, Adam and CAO, in one picture.

Run it with `python examples/sharpness.py`; it takes less than a minute and writes out/sharpness.png. Training is on
the full batch, so an epoch is a step. Gradient descent with rate α is stable where the curvature stays below 2/α, and
training drives the curvature up to that edge (Cohen et al. 2021). An optimizer that multiplies gradients by a
preconditioner P meets the same edge in the eigenvalues of PH instead of those of H.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim import SGD, Adam, Optimizer

from cao import CAO, Eigenpairs, Hessian, SymmetricOperator, top_eigenpairs

LR, ADAM_LR, DAMPING = 0.14, 5e-3, 2.0
# Adam's momentum moves the edge: (2 + 2β₁)/(1 − β₁) = 38 for β₁ = 0.9.
EDGE, ADAM_EDGE = 2 / LR, 38 / ADAM_LR
COLOURS = {"SGD": "#00287b", "Adam": "#00a856", "CAO": "#c2185b"}

Root = Callable[[Tensor], Tensor]
"""Multiplies columns by the square root of a preconditioner."""


class Preconditioned:
    """P^½ H P^½, which has the eigenvalues of PH and is symmetric."""

    def __init__(self, hessian: Hessian, root: Root) -> None:
        self.hessian, self.root, self.params = hessian, root, hessian.params

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.root(self.hessian @ self.root(columns))


@dataclass
class Curve:
    """What one optimizer's training showed."""

    epochs: list[int] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)
    """λ₁ of the Hessian."""
    distance: list[float] = field(default_factory=list)
    """λ₁ of the preconditioned Hessian, as a share of the edge."""
    loss: float = math.nan


def largest_eigenvalue(operator: SymmetricOperator) -> float:
    # With a loose tolerance the second eigenvalue may pass for the first.
    return float(top_eigenpairs(operator, tolerance=0.02).values)


def adam_root(optimizer: Adam) -> Root | None:
    """Return the root of Adam's preconditioner diag(1/(√v + ε)), None before its first step."""
    group = optimizer.param_groups[0]
    states = [optimizer.state[p] for p in group["params"]]
    if not states[0]:
        return None
    correction = 1 - group["betas"][1] ** float(states[0]["step"])
    mean_squares = torch.cat([state["exp_avg_sq"].flatten() for state in states]) / correction
    scale = (mean_squares.sqrt() + group["eps"]).rsqrt().unsqueeze(1)
    return lambda columns: scale * columns


def cao_root(sketch: Eigenpairs) -> Root:
    """Return the root of CAO's preconditioner: η/(|λ| + η) along the sketch, 1 elsewhere."""
    gains = (DAMPING / (sketch.values.abs() + DAMPING)).sqrt() - 1
    return lambda columns: columns + sketch.vectors @ (gains.unsqueeze(1) * (sketch.vectors.T @ columns))


def optimizer_of(name: str, params: list[nn.Parameter]) -> Optimizer:
    if name == "CAO":
        return CAO(params, lr=LR, rank=2, damping=DAMPING, scaling="unit", refresh_every=20)
    return Adam(params, lr=ADAM_LR) if name == "Adam" else SGD(params, lr=LR)


def train(name: str, epochs: int, measure_every: int) -> Curve:
    torch.manual_seed(0)
    # A quarter of the digits, and squared error: cross-entropy would flatten as soon as all digits are told apart.
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32)[::4] / 8 - 1
    targets = one_hot(torch.tensor(labels)[::4], 10).float()
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = optimizer_of(name, list(model.parameters()))
    edge = ADAM_EDGE if name == "Adam" else EDGE
    root: Root | None = None
    curve = Curve()
    for epoch in range(epochs):
        loss = (model(inputs) - targets).square().sum(dim=1).mean() / 2
        hessian = Hessian(loss, model.parameters())
        optimizer.zero_grad()
        if isinstance(optimizer, CAO) and optimizer.is_refresh_due:
            sketch = top_eigenpairs(hessian, 2, tolerance=0.02, which="magnitude")
            optimizer.refresh(sketch)
            root = cao_root(sketch)
        if epoch % measure_every == 0:
            root = adam_root(optimizer) if isinstance(optimizer, Adam) else root
            sharpness = largest_eigenvalue(hessian)
            effective = largest_eigenvalue(Preconditioned(hessian, root)) if root else sharpness
            curve.epochs.append(epoch)
            curve.sharpness.append(sharpness)
            curve.distance.append(math.nan if name == "Adam" and root is None else effective / edge)
        loss.backward()
        optimizer.step()
        curve.loss = loss.item()
    return curve


def picture(curves: dict[str, Curve]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, curve in curves.items():
        label = f"{name} (loss {curve.loss:.2g})"
        left.plot(curve.epochs, curve.sharpness, color=COLOURS[name], label=label)
        right.plot(curve.epochs, curve.distance, color=COLOURS[name], label=name)
    left.axhline(EDGE, color="#444444", linestyle="--", linewidth=1, label=f"2/α = {EDGE:.1f}, the edge of SGD")
    right.axhline(1, color="#444444", linestyle="--", linewidth=1, label="edge of stability")
    left.set(title="Sharpness", ylabel="λ₁ of H")
    right.set(title="Sharpness as the optimizer feels it", ylabel="λ₁ of PH as a share of the edge", ylim=(0, 1.6))
    left.set_ylim(0)
    for axes in (left, right):
        axes.set_xlabel("epochs (full batch)")
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    return figure


def main(epochs: int, out: Path) -> None:
    curves = {name: train(name, epochs, measure_every=max(1, epochs // 50)) for name in COLOURS}
    for name, curve in curves.items():
        print(f"{name}: loss {curve.loss:.3g}, λ₁ {curve.sharpness[-1]:.3g}, {curve.distance[-1]:.2f} of the edge")
    out.parent.mkdir(parents=True, exist_ok=True)
    picture(curves).savefig(out, dpi=140)
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("out/sharpness.png"))
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.out)

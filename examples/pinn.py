"""Solve Helmholtz' equation with a network: L-BFGS of torch and SketchedLBFGS, from one start, in the same time.

Seconds are those of the processor, on one thread, so that other programs do not count.

python examples/pinn.py                # two minutes; writes out/pinn.png
python examples/pinn.py --seconds 5    # a first look
"""

import copy
import time
from argparse import ArgumentParser
from collections.abc import Callable
from math import pi
from pathlib import Path

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from cao import LeastSquares, SketchedLBFGS

torch.set_default_dtype(torch.float64)  # L-BFGS of any kind soon runs out of digits in float32.
torch.set_num_threads(1)
Residuals = Callable[[], tuple[Tensor, ...]]
Curve = list[tuple[float, float]]


class Field(nn.Module):
    """A network u(x, y)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)]
        self.layers = nn.Sequential(*(part for layer in hidden for part in (layer, nn.Tanh())), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.layers(torch.stack([x, y], dim=1))[:, 0]
        return value


def exact(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(pi * x) * torch.sin(4 * pi * y)


def derivative(value: Tensor, coordinate: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), coordinate, create_graph=True)[0]


def residuals_of(field: Field, points: int) -> Residuals:
    """Δu + u − f inside, u on the border: the loss is the sum of their squares, each weighted by its number."""
    generator = torch.Generator().manual_seed(0)
    x, y = (2 * torch.rand(2, points, generator=generator) - 1).unbind()
    x.requires_grad_()
    y.requires_grad_()
    line, end = torch.linspace(-1, 1, 50), torch.ones(50)
    border_x, border_y = torch.cat([line, line, -end, end]), torch.cat([-end, end, line, line])
    force = (1 - 17 * pi**2) * exact(x, y).detach()

    def residuals() -> tuple[Tensor, Tensor]:
        u = field(x, y)
        laplacian = derivative(derivative(u, x), x) + derivative(derivative(u, y), y)
        border = field(border_x, border_y)
        return (laplacian + u - force) / points**0.5, border / len(border) ** 0.5

    return residuals


def train(name: str, optimizer: torch.optim.Optimizer, residuals: Residuals, seconds: float) -> Curve:
    """Step until the time is up, and return the lowest loss so far after each evaluation."""
    curve: Curve = []
    start = time.process_time()

    def closure() -> float:
        optimizer.zero_grad()
        loss = torch.stack([part.square().sum() for part in residuals()]).sum()
        loss.backward()
        lowest = min(float(loss.detach()), curve[-1][1] if curve else float("inf"))
        curve.append((time.process_time() - start, lowest))
        return float(loss.detach())

    with tqdm(total=seconds, desc=f"{name:14}", bar_format="{desc} {percentage:3.0f}% |{bar:30}| {postfix}") as bar:
        while not curve or curve[-1][0] < seconds:
            optimizer.step(closure)
            bar.set_postfix_str(f"loss {curve[-1][1]:.2e}, {len(curve)} evaluations")
            bar.update(min(curve[-1][0], seconds) - bar.n)
    return curve


def picture(fields: dict[str, Field], curves: dict[str, Curve]) -> Figure:
    """Draw the solution, the error of each method on one scale, and their losses over time."""
    line = torch.linspace(-1, 1, 200)
    x, y = (axis.reshape(-1) for axis in torch.meshgrid(line, line, indexing="xy"))
    figure = Figure(figsize=(13, 3.3), dpi=120, layout="constrained")
    losses, solution, *errors = figure.subplots(1, 2 + len(fields))
    for name, curve in curves.items():
        losses.plot(*zip(*curve, strict=True), label=name)
    losses.set(yscale="log", xlabel="seconds", title="Helmholtz' equation:\nloss")
    losses.legend()
    truth = exact(x, y).reshape(200, 200)
    figure.colorbar(solution.imshow(truth, extent=(-1, 1, -1, 1), origin="lower"), ax=solution)
    solution.set_title("the solution\nu(x, y)")
    for axes, (name, field) in zip(errors, fields.items(), strict=True):
        with torch.no_grad():
            error = (field(x, y).reshape(200, 200) - truth).abs()
        relative = float(error.norm() / truth.norm())
        print(f"{name}: loss {curves[name][-1][1]:.2e}, relative error {relative:.1e}")
        axes.set_title(f"{name}:\nrelative error {relative:.2g}")
        image = axes.imshow(error, norm=LogNorm(1e-4, 10), extent=(-1, 1, -1, 1), origin="lower", cmap="magma")
    figure.colorbar(image, ax=errors, label="absolute error")
    for axes in (solution, *errors):
        axes.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    parser = ArgumentParser(description="Two optimizers on one physics-informed network.")
    parser.add_argument("--seconds", type=float, default=50.0, help="time for each of the two")
    parser.add_argument("--adam", type=int, default=1_000, help="steps of Adam before both")
    parser.add_argument("--width", type=int, default=20, help="units of a hidden layer")
    parser.add_argument("--points", type=int, default=1_000, help="points inside the square")
    options = parser.parse_args()
    torch.manual_seed(0)
    start = Field(options.width)
    residuals = residuals_of(start, options.points)
    adam = torch.optim.Adam(start.parameters(), lr=1e-3)
    for _ in tqdm(range(options.adam), desc="Adam, for both"):
        adam.zero_grad()
        torch.stack([part.square().sum() for part in residuals()]).sum().backward()
        adam.step()

    fields = {"L-BFGS": copy.deepcopy(start), "SketchedLBFGS": copy.deepcopy(start)}
    curves = {}
    for name, field in fields.items():
        residuals, params = residuals_of(field, options.points), list(field.parameters())
        optimizer: torch.optim.Optimizer
        if name == "L-BFGS":
            optimizer = torch.optim.LBFGS(
                params, history_size=100, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
            )
        else:
            optimizer = SketchedLBFGS(params, source=LeastSquares(residuals, params))
        curves[name] = train(name, optimizer, residuals, options.seconds)
    path = Path("out/pinn.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(fields, curves).savefig(path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

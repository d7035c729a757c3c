"""Solve Helmholtz' equation with a network: L-BFGS of torch, SSBroyden and SketchedLBFGS, from one start.

SSBroyden is the strongest rival known for small networks, and the laboratory's own. Seconds are those of the processor,
on one thread, so that other programs do not count; measuring errors is not counted either.

python examples/pinn.py                # three minutes; writes out/pinn.png
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
from cao_lab.solvers.budget import Budget
from cao_lab.solvers.methods.self_scaled import SelfScaledBroyden
from cao_lab.solvers.solving import solve
from cao_lab.tasks.pde.problem import least_squares

torch.set_default_dtype(torch.float64)  # L-BFGS of any kind soon runs out of digits in float32.
torch.set_num_threads(1)
Residuals = Callable[[], tuple[Tensor, ...]]
Curve = list[tuple[float, float, float]]
"""Seconds, the lowest loss so far, the relative error."""
LINE = torch.linspace(-1, 1, 200)
GRID = torch.meshgrid(LINE, LINE, indexing="xy")


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


@torch.no_grad()
def errors_of(field: Field) -> Tensor:
    """The absolute errors on a grid."""
    x, y = (axis.reshape(-1) for axis in GRID)
    errors: Tensor = (field(x, y) - exact(x, y)).abs()
    return errors.reshape(GRID[0].shape)


def relative_error(field: Field) -> float:
    return float(errors_of(field).norm() / exact(*GRID).norm())


def train(field: Field, optimizer: torch.optim.Optimizer, residuals: Residuals, seconds: float) -> Curve:
    """Step until the time is up."""
    losses: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = torch.stack([part.square().sum() for part in residuals()]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        return losses[-1]

    curve = [(0.0, closure(), relative_error(field))]
    with tqdm(total=seconds, bar_format="{percentage:3.0f}% |{bar:30}| {postfix}") as bar:
        while curve[-1][0] < seconds:
            start = time.process_time()
            optimizer.step(closure)
            spent = time.process_time() - start
            curve.append((curve[-1][0] + spent, min(losses), relative_error(field)))
            bar.set_postfix_str(f"loss {curve[-1][1]:.2e}, error {curve[-1][2]:.2e}")
            bar.update(min(spent, seconds - bar.n))
    return curve


def train_with_ssbroyden(field: Field, residuals: Residuals, seconds: float) -> Curve:
    """Let the laboratory run its peer, and leave the best point in the field."""
    problem = least_squares("helmholtz", list(field.parameters()), residuals, lambda: relative_error(field))
    return [(one.seconds, one.loss, one.error) for one in solve(problem, SelfScaledBroyden(), Budget(seconds=seconds))]


def picture(fields: dict[str, Field], curves: dict[str, Curve]) -> Figure:
    """Draw loss and error over time, the solution, and the error of each method on one scale."""
    figure = Figure(figsize=(16, 3.3), dpi=110, layout="constrained")
    over_time, (solution, *errors) = figure.subplots(1, 3 + len(fields))[:2], figure.axes[2:]
    for column, (axes, what) in enumerate(zip(over_time, ("loss", "relative error"), strict=True), start=1):
        for name, curve in curves.items():
            axes.plot([row[0] for row in curve], [row[column] for row in curve], label=name)
        axes.set(yscale="log", xlabel="seconds", title=f"Helmholtz' equation:\n{what}")
    over_time[0].legend()
    figure.colorbar(solution.imshow(exact(*GRID), extent=(-1, 1, -1, 1), origin="lower"), ax=solution)
    solution.set_title("the solution\nu(x, y)")
    for axes, (name, field) in zip(errors, fields.items(), strict=True):
        relative = relative_error(field)
        print(f"{name}: loss {curves[name][-1][1]:.2e}, relative error {relative:.1e}")
        axes.set_title(f"{name}:\nrelative error {relative:.1e}")
        scale = LogNorm(1e-6, 1)
        image = axes.imshow(errors_of(field), norm=scale, extent=(-1, 1, -1, 1), origin="lower", cmap="magma")
    figure.colorbar(image, ax=errors, label="absolute error")
    for axes in (solution, *errors):
        axes.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    parser = ArgumentParser(description="Three optimizers on one physics-informed network.")
    parser.add_argument("--seconds", type=float, default=50.0, help="time for each of them")
    parser.add_argument("--adam", type=int, default=1_000, help="steps of Adam before all")
    parser.add_argument("--width", type=int, default=20, help="units of a hidden layer")
    parser.add_argument("--points", type=int, default=1_000, help="points inside the square")
    options = parser.parse_args()
    torch.manual_seed(0)
    start = Field(options.width)
    residuals = residuals_of(start, options.points)
    adam = torch.optim.Adam(start.parameters(), lr=1e-3)
    for _ in tqdm(range(options.adam), desc="Adam, for all"):
        adam.zero_grad()
        torch.stack([part.square().sum() for part in residuals()]).sum().backward()
        adam.step()

    fields = {name: copy.deepcopy(start) for name in ("L-BFGS", "SSBroyden", "SketchedLBFGS")}
    curves = {}
    for name, field in fields.items():
        residuals, params = residuals_of(field, options.points), list(field.parameters())
        optimizer: torch.optim.Optimizer
        if name == "SSBroyden":
            curves[name] = train_with_ssbroyden(field, residuals, options.seconds)
            continue
        if name == "L-BFGS":
            optimizer = torch.optim.LBFGS(
                params, history_size=100, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
            )
        else:
            optimizer = SketchedLBFGS(params, source=LeastSquares(residuals, params))
        curves[name] = train(field, optimizer, residuals, options.seconds)
    path = Path("out/pinn.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(fields, curves).savefig(path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

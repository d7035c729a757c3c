"""Residuals as users write them, and their Jacobian row by row, which shares no code with ours."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Residuals = Callable[[], Tensor | tuple[Tensor, ...]]


def network(outputs: int = 1, inputs: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)]
        return nn.Sequential(*layers).double()


def points(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, generator=generator, dtype=torch.float64).requires_grad_()


def slope(outputs: Tensor, inputs: Tensor) -> Tensor:
    return torch.autograd.grad(outputs, inputs, torch.ones_like(outputs), create_graph=True)[0]


def regression(model: nn.Module) -> Residuals:
    inputs = points(12)
    return lambda: model(inputs) - torch.sin(inputs.sum(dim=1, keepdim=True))


def poisson(model: nn.Module) -> Residuals:
    inside, border = points(12), points(5, seed=1)

    def residuals() -> tuple[Tensor, ...]:
        gradient = slope(model(inside), inside)
        laplacian = slope(gradient[:, 0], inside)[:, 0] + slope(gradient[:, 1], inside)[:, 1]
        return (laplacian - 1) / math.sqrt(12), model(border) / math.sqrt(5)

    return residuals


def burgers(model: nn.Module) -> Residuals:
    inside, first = points(12), points(5, seed=1)

    def residuals() -> tuple[Tensor, ...]:
        value = model(inside)
        gradient = slope(value, inside)
        curvature = slope(gradient[:, 0], inside)[:, :1]
        return gradient[:, 1:] + value * gradient[:, :1] - 0.01 * curvature, model(first) + 1

    return residuals


def korteweg_de_vries(model: nn.Module) -> Residuals:
    inside = points(12)

    def residuals() -> Tensor:
        value = model(inside)
        first = slope(value, inside)
        third = slope(slope(first[:, 0], inside)[:, 0], inside)
        return first[:, 1:] + 6 * value * first[:, :1] + third[:, :1]

    return residuals


def periodic_convection(model: nn.Module) -> Residuals:
    inside, left, right = points(12), points(5, seed=1), points(5, seed=2)

    def residuals() -> tuple[Tensor, ...]:
        gradient = slope(model(inside), inside)
        return gradient[:, 1] + 3 * gradient[:, 0], model(left) - model(right)

    return residuals


def joined(model: nn.Module) -> Residuals:
    """All residuals in one vector, the border's first and backwards."""
    inside, border = points(12), points(5, seed=1)
    return lambda: torch.cat([model(border)[:, 0].flip(0), slope(model(inside), inside)[:, 1]])


def two_equations(model: nn.Module) -> Residuals:
    inside = points(12)
    return lambda: slope(model(inside), inside)


def mean_over_points(model: nn.Module) -> Residuals:
    inside = points(12)
    return lambda: (model(inside).mean() - 1, model(inside) ** 2)


def coupled_points(model: nn.Module) -> Residuals:
    """Each residual depends on two rows of one call, and each row enters two residuals."""
    inside = points(12)

    def residuals() -> Tensor:
        values = model(inside)[:, 0]
        return values[1:] - values[:-1] ** 2

    return residuals


def three_dimensional_inputs(model: nn.Module) -> Residuals:
    inside = points(12).reshape(3, 4, 2)
    return lambda: model(inside) - 1


WITH_JACOBIAN = [
    regression, poisson, burgers, korteweg_de_vries, periodic_convection, joined, two_equations, mean_over_points,
    three_dimensional_inputs,
]  # fmt: skip
WITHOUT_JACOBIAN = [coupled_points]


def dense_jacobian(residuals: Residuals, params: list[Tensor]) -> Tensor:
    result = residuals()
    tensors = (result,) if isinstance(result, Tensor) else result
    # Columns of a matrix are vectors of their own, in the order of LeastSquares; the order does not matter to JᵀJ.
    entries = [entry for tensor in tensors for entry in tensor.reshape(-1)]
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in entries]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def dense(operator: object, params: list[Tensor]) -> Tensor:
    size = sum(p.numel() for p in params)
    return operator @ torch.eye(size, dtype=torch.float64)  # type: ignore[no-any-return, operator]

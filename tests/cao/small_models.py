"""Small problems that the optimizer's tests share, each with a dense answer to compare with."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from cao import CAO

SPECTRUM = (9.0, -4.0, 2.0, 1.0, 0.5, -0.25)


def fixed(
    params: Any, lr: float, rank: int = 1, refresh_every: int = 400, damping: float = 0.1, **settings: Any
) -> CAO:
    """Return CAO with fixed settings, and none of those that the paper's reproduction adds to them."""
    return CAO(params, lr, rank=rank, refresh_every=refresh_every, damping=damping, **settings)


class Quadratic:
    """½ θᵀAθ + bᵀθ with a prescribed spectrum, its θ split into parameters of the given sizes."""

    def __init__(self, spectrum: tuple[float, ...] = SPECTRUM, sizes: tuple[int, ...] | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        n = len(spectrum)
        basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
        self.matrix = basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T
        self.slope, start = torch.randn(2, n, generator=generator, dtype=torch.float64)
        self.params = [piece.clone().requires_grad_() for piece in start.split(list(sizes or (n,)))]

    def loss(self) -> Tensor:
        theta = torch.cat(self.params)
        return theta @ self.matrix @ theta / 2 + self.slope @ theta

    @property
    def theta(self) -> Tensor:
        return torch.cat(self.params).detach().clone()

    def gradient(self, theta: Tensor) -> Tensor:
        return self.matrix @ theta + self.slope


class Attention(nn.Module):
    """A one-layer transformer small enough for a dense Hessian, by torch's own attention."""

    def __init__(self, width: int = 4, checkpoint: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(3, width), nn.Linear(width, 3 * width), nn.Linear(width, 2)
        self.checkpoint = checkpoint

    def attend(self, hidden: Tensor) -> Tensor:
        return hidden + scaled_dot_product_attention(*self.mix(hidden).unsqueeze(1).chunk(3, dim=-1)).squeeze(1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        hidden = self.checkpoint(self.attend, hidden) if self.checkpoint else self.attend(hidden)
        return self.head(hidden).mean(dim=1)


class Recurrent(nn.Module):
    """An LSTM that classifies by its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.memory(inputs)[0][:, -1])


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model from the same random numbers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().to(dtype)


def smooth_network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), dtype)


def noisy_network() -> nn.Module:
    """A network with everything that a second forward pass could disturb: statistics and dropout."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 2))
    )


def batch(samples: int = 8, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draw inputs (of three features, unless a shape is given) and labels of two classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *(shape or (3,)), generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(2, (samples,), generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def losses_of_parts(model: nn.Module, data: tuple[Tensor, Tensor], size: int) -> Iterator[Tensor]:
    for part in zip(*(tensor.split(size) for tensor in data), strict=True):
        yield loss_of(model, part)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def flat_params(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


def dense_hessian(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the Hessian over all parameters by torch.func, which shares no code with ours."""
    named = dict(model.named_parameters())

    def loss_at(theta: Tensor) -> Tensor:
        pieces = theta.split([p.numel() for p in named.values()])
        replaced = {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        return cross_entropy(functional_call(model, replaced, data[0]), data[1])

    return hessian(loss_at)(flat_params(model))


def top_sketch(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of largest magnitude and their vectors, by a dense decomposition."""
    values, vectors = torch.linalg.eigh(matrix)
    top = values.abs().argsort(descending=True)[:rank]
    return values[top], vectors[:, top]


def dense_preconditioner(
    matrix: Tensor, rank: int, damping: float, curvature: Callable[[Tensor], Tensor] = torch.abs
) -> Tensor:
    """Return (B + ηI)⁻¹ as a dense inverse."""
    values, vectors = top_sketch(matrix, rank)
    sketch = vectors @ torch.diag(curvature(values)) @ vectors.T
    return torch.linalg.inv(sketch + damping * torch.eye(len(matrix), dtype=matrix.dtype))


def step_on(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Do what the documented loop does with a loss; another optimizer than ours has no curvature to refresh."""
    optimizer.zero_grad()
    if isinstance(optimizer, CAO):
        optimizer.refresh_if_due(loss)
    loss.backward()
    optimizer.step()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take one step a batch."""
    for data in batches:
        step_on(loss_of(model, data), optimizer)


def uneven_network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network whose parameters, laid end to end, start at odd places in memory."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 2)), dtype
    )


def ten_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> Tensor:
    """Train on ten batches, the same ones for the same first step, and return where that led."""
    dtype = next(model.parameters()).dtype
    train(model, optimizer, [batch(seed=seed, dtype=dtype) for seed in range(first, first + 10)])
    return flat_params(model)


def descend(problem: Quadratic, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    """Take steps on a quadratic and return where they led."""
    for _ in range(steps):
        step_on(problem.loss(), optimizer)
    return problem.theta

"""From an optimizer's config to the optimizer, and to the way it takes a step."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cao import CAO, Eigenpairs, Sketch
from cao.flat import FlatParams
from cao.linalg import generator_for, orthonormalize, random_columns
from cao.operators import ParameterOperator
from cao.policies import eigensolver_for
from cao_lab.config import ConfigError
from cao_lab.optimizer_config import (
    AdaHessianConfig,
    AdamConfig,
    AdamWConfig,
    CAOConfig,
    LBFGSConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    SOAPConfig,
)

# λ → ∞ for the projected-out control: λ/(λ + η) is 1 to the last bit of float32.
INFINITE_CURVATURE = 1e12


class Objective(Protocol):
    """The loss of a batch as optimizers see it."""

    def __call__(self) -> Tensor:
        """Run the model and return the loss with its graph."""
        ...

    @property
    def is_curvature_of_the_graph(self) -> bool:
        """Whether the curvature is made from the graph of the loss."""
        ...

    def curvature(self, loss: Tensor | None) -> ParameterOperator:
        """Return the matrix to sketch."""
        ...


@dataclass(frozen=True)
class Refreshed:
    """A refresh that has just been made, while its graph is alive: the matrix, and how to get its true eigenpairs."""

    operator: ParameterOperator
    eigenpairs: Callable[[], Eigenpairs]
    damping: float


OnRefresh = Callable[[Refreshed], None]


@dataclass(frozen=True)
class Method:
    """An optimizer, how it takes a step, and what curvature it has used so far."""

    optimizer: Optimizer
    step: Callable[[Objective, OnRefresh], None]
    hessian_products: Callable[[], int] = lambda: 0
    refreshes: Callable[[], int] = lambda: 0


@singledispatch
def build_method(config: OptimizerConfig, model: nn.Module, seed: int) -> Method:
    """Build the optimizer that a config describes, for the trainable parameters of a model."""
    raise TypeError(f"no optimizer is built from {type(config).__name__}; register one with build_method")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer may move."""
    return [p for p in model.parameters() if p.requires_grad]


def first_order(optimizer: Optimizer, max_gradient_norm: float | None, decay: float) -> Method:
    """Return the method whose step is a gradient, a clip and an update."""

    def step(objective: Objective, _: OnRefresh) -> None:
        optimizer.zero_grad()
        objective().backward()
        if max_gradient_norm is not None:
            params = (p for group in optimizer.param_groups for p in group["params"])
            clip_with_decay(params, decay, max_gradient_norm)
        optimizer.step()

    return Method(optimizer, step)


@torch.no_grad()
def clip_with_decay(params: Iterable[Tensor], decay: float, max_norm: float) -> None:
    """Change the gradients so that g + decay·θ, which the optimizer is about to form, is clipped at `max_norm`.

    Clipping after the weight decay is what Algorithm 1 does, and so SGD is clipped exactly as CAO of rank 0.
    """
    moving = [p for p in params if p.grad is not None]
    full = [p.grad.add(p, alpha=decay) for p in moving if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(full)
    shrink = (max_norm / norm).clamp(max=1.0)
    for p, gradient in zip(moving, full, strict=True):
        p.grad = gradient.mul_(shrink).sub_(p, alpha=decay)


@build_method.register
def _(config: SGDConfig, model: nn.Module, seed: int) -> Method:
    optimizer = torch.optim.SGD(
        trainable(model),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )
    return first_order(optimizer, config.max_gradient_norm, config.weight_decay)


@build_method.register
def _(config: AdamConfig, model: nn.Module, seed: int) -> Method:
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.Adam(
        trainable(model), lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return first_order(optimizer, config.max_gradient_norm, config.weight_decay)


@build_method.register
def _(config: AdamWConfig, model: nn.Module, seed: int) -> Method:
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        trainable(model), lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return first_order(optimizer, config.max_gradient_norm, decay=0.0)


@build_method.register
def _(config: LBFGSConfig, model: nn.Module, seed: int) -> Method:
    optimizer = torch.optim.LBFGS(
        trainable(model),
        lr=config.lr,
        max_iter=config.max_iterations,
        history_size=config.history,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe" if config.line_search == "strong-wolfe" else None,
    )

    def step(objective: Objective, _: OnRefresh) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = objective()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)

    return Method(optimizer, step)


@build_method.register
def _(config: CAOConfig, model: nn.Module, seed: int) -> Method:
    settings = {key: value for key, value in asdict(config).items() if key not in ("name", "sketch")}
    params = trainable(model)
    optimizer = CAO(params, seed=seed, **settings)
    size = sum(p.numel() for p in params)
    if config.rank > size:
        raise ConfigError(f"rank must not exceed the number of parameters, got {config.rank} for {size}")

    def step(objective: Objective, on_refresh: OnRefresh) -> None:
        optimizer.zero_grad()
        if optimizer.is_refresh_due and not objective.is_curvature_of_the_graph:
            # Before the forward pass, so that memory never holds its graph and those of the curvature together.
            refresh(optimizer, objective.curvature(None), config, on_refresh)
        loss = objective()
        if optimizer.is_refresh_due:
            refresh(optimizer, objective.curvature(loss), config, on_refresh)
        loss.backward()
        optimizer.step()

    return Method(
        optimizer,
        step,
        hessian_products=lambda: optimizer.counters.hessian_products,
        refreshes=lambda: optimizer.counters.refreshes,
    )


def refresh(optimizer: CAO, operator: ParameterOperator, config: CAOConfig, on_refresh: OnRefresh) -> None:
    """Refresh the sketch, or put a control in its place, and tell of it if something finite came out."""
    generator = generator_for(operator.params[0].device, optimizer.param_groups[0]["seed"], optimizer.counters.steps)
    true = None if config.sketch == "top" else top_eigenpairs(operator, config, generator)
    is_new = optimizer.refresh(operator if true is None else control(true, config, generator))
    if is_new and (sketch := optimizer.sketch) is not None:
        # Putting the vectors together takes memory that only the log needs, so that is left to whoever writes it.
        on_refresh(Refreshed(operator, lambda: true or captured_eigenpairs(sketch), sketch.damping))


def captured_eigenpairs(sketch: Sketch) -> Eigenpairs:
    """Return the sketch in use as eigenpairs."""
    vectors = sketch.vectors
    return Eigenpairs(vectors.new_tensor(sketch.values), vectors, vectors.new_tensor(sketch.residuals))


def top_eigenpairs(operator: ParameterOperator, config: CAOConfig, generator: torch.Generator) -> Eigenpairs:
    """Return what CAO itself would have found from a cold start."""
    flat = FlatParams(operator.params)
    solve = eigensolver_for(config.eigensolver, config.power_iterations, config.tolerance)
    return solve(operator, random_columns(flat.size, config.rank, generator, flat.dtype))


def control(true: Eigenpairs, config: CAOConfig, generator: torch.Generator) -> Eigenpairs:
    """Return random directions with the true eigenvalues, or the true directions with infinite ones."""
    if config.sketch == "projected-out":
        return replace(true, values=torch.full_like(true.values, INFINITE_CURVATURE))
    size, rank = true.vectors.shape
    return replace(true, vectors=orthonormalize(random_columns(size, rank, generator, true.vectors.dtype)))


@build_method.register
def _(config: AdaHessianConfig, model: nn.Module, seed: int) -> Method:
    optimizer = baseline("AdaHessian")(
        trainable(model),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        update_period=config.update_every,
    )

    def step(objective: Objective, _: OnRefresh) -> None:
        params = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(objective(), params, create_graph=True)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        # The gradients carry the graph, and the graph the gradients: memory would never be freed.
        optimizer.zero_grad(set_to_none=True)

    def products() -> int:
        steps: int = optimizer.param_groups[0].get("step", 0)
        return -(-steps // config.update_every)

    return Method(optimizer, step, hessian_products=products)


@build_method.register
def _(config: SOAPConfig, model: nn.Module, seed: int) -> Method:
    optimizer = baseline("SOAP")(
        trainable(model),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        precondition_frequency=config.update_every,
    )
    return first_order(optimizer, max_gradient_norm=None, decay=0.0)


@build_method.register
def _(config: MuonConfig, model: nn.Module, seed: int) -> Method:
    params = trainable(model)
    matrices = [p for p in params if p.ndim >= 2]
    # The first and last layers are not hidden, and go to AdamW with the gains and biases.
    hidden = {id(p) for p in matrices[1:-1]}
    groups = [
        {"params": [p for p in params if id(p) in hidden], "lr": config.lr, "use_muon": True},
        {"params": [p for p in params if id(p) not in hidden], "lr": config.adamw_lr, "use_muon": False},
    ]
    optimizer = baseline("Muon")(
        [{**group, "weight_decay": config.weight_decay} for group in groups if group["params"]],
        momentum=config.momentum,
    )
    return first_order(optimizer, max_gradient_norm=None, decay=0.0)


def baseline(name: str) -> Any:
    """Return an optimizer class of pytorch_optimizer, which is not installed by default."""
    try:
        import pytorch_optimizer  # noqa: PLC0415  # an extra: imported when asked for
    except ImportError as error:
        raise ConfigError(f"{name} needs the extra `baselines`: pip install 'cao-optimizer[baselines]'") from error
    return getattr(pytorch_optimizer, name)

"""One frozen dataclass an optimizer: the text under a field is the command line's help."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import tyro

from cao_lab.assumptions import (
    ADAM_LR,
    BASE_LR,
    CLIP_GRADIENT,
    CLIP_UPDATE,
    DAMPING,
    POWER_ITERATIONS,
    WARM_START,
    WARMUP_STEPS,
    WEIGHT_DECAY,
)


@dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    name: tyro.conf.Suppress[Literal["sgd"]] = "sgd"
    lr: float = BASE_LR
    """Learning rate."""
    momentum: float = 0.9
    """Momentum; 0 turns it off."""
    nesterov: bool = False
    """Use Nesterov's form of momentum."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""


@dataclass(frozen=True)
class AdamConfig:
    """Adam (torch.optim.Adam)."""

    name: tyro.conf.Suppress[Literal["adam"]] = "adam"
    lr: float = ADAM_LR
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""


@dataclass(frozen=True)
class AdamWConfig:
    """Adam with decoupled weight decay (torch.optim.AdamW)."""

    name: tyro.conf.Suppress[Literal["adamw"]] = "adamw"
    lr: float = ADAM_LR
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Weight decay, decoupled from the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient to this norm."""


@dataclass(frozen=True)
class LBFGSConfig:
    """L-BFGS (torch.optim.LBFGS), for full batches: --batch-size None."""

    name: tyro.conf.Suppress[Literal["lbfgs"]] = "lbfgs"
    lr: float = 1.0
    """Learning rate, or the first trial of the line search."""
    max_iterations: int = 10
    """Iterations in a step, each with one or more gradients."""
    history: int = 10
    """Pairs of differences kept."""
    line_search: Literal["strong-wolfe", "none"] = "strong-wolfe"
    """How the length of an iteration is found."""


@dataclass(frozen=True)
class CAOConfig:
    """CAO: steps preconditioned in the top eigenspace of the Hessian, refreshed now and then."""

    name: tyro.conf.Suppress[Literal["cao"]] = "cao"
    lr: float = BASE_LR
    """Learning rate α. With scaling=inverse-damping the complement moves at α/η."""
    rank: int = 1
    """Eigenpairs k in the sketch."""
    refresh_every: int = 400
    """Steps m from one sketch to the next."""
    damping: float | Literal["auto"] = DAMPING
    """Damping η, or "auto": the smallest captured eigenvalue (full or large batches, with --lr 1)."""
    power_iterations: int = POWER_ITERATIONS
    """Sweeps T_pow of a refresh, each of k products."""
    tolerance: float | None = None
    """Stop the sweeps when every residual is below this share of its eigenvalue."""
    warm_start: bool = WARM_START
    """Start a refresh from the last subspace; the paper starts from random vectors."""
    eigensolver: Literal["subspace", "lanczos"] = "subspace"
    """Algorithm 2 (subspace iteration), or the block Lanczos method that the paper's text names."""
    negative_curvature: Literal["magnitude", "clip", "signed"] = "magnitude"
    """For λ < 0 use |λ|, 0, or λ itself; the last is the paper's rule and may step uphill."""
    scaling: Literal["inverse-damping", "unit"] = "inverse-damping"
    """(B + ηI)⁻¹ as the paper's text has it, or η times that, with which rank 0 is SGD."""
    max_update_norm: float | None = CLIP_UPDATE
    """Clip the preconditioned gradient to this norm c."""
    momentum: float = 0.0
    """Momentum; the paper has none."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay."""
    decoupled_weight_decay: bool = False
    """Decouple weight decay from the gradient, as AdamW does."""
    warmup_steps: int = WARMUP_STEPS
    """Plain SGD steps before the first sketch."""
    sketch: Literal["top", "random", "projected-out"] = "top"
    """The top eigenpairs; or a control: random directions with the true λ, or the top ones with λ → ∞."""


@dataclass(frozen=True)
class AdaHessianConfig:
    """AdaHessian (pytorch_optimizer): Adam on the diagonal of the Hessian, one product a step."""

    name: tyro.conf.Suppress[Literal["adahessian"]] = "adahessian"
    lr: float = 0.1
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the Hessian diagonal's mean square."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, decoupled."""
    update_every: int = 1
    """Steps from one Hessian product to the next."""


@dataclass(frozen=True)
class SOAPConfig:
    """SOAP (pytorch_optimizer): Adam in the eigenbasis of Shampoo's preconditioner."""

    name: tyro.conf.Suppress[Literal["soap"]] = "soap"
    lr: float = 3e-3
    """Learning rate."""
    beta1: float = 0.95
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's mean square and of the preconditioner."""
    weight_decay: float = 0.01
    """Weight decay, decoupled."""
    update_every: int = 10
    """Steps from one eigenbasis to the next."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon (pytorch_optimizer): orthogonalised momentum for hidden weights, AdamW for the rest."""

    name: tyro.conf.Suppress[Literal["muon"]] = "muon"
    lr: float = 0.02
    """Learning rate of the hidden weight matrices."""
    momentum: float = 0.95
    """Momentum."""
    weight_decay: float = 0.01
    """Weight decay, decoupled."""
    adamw_lr: float = ADAM_LR
    """Learning rate of the first and last layer, gains and biases."""


# A further optimizer is a dataclass above, its name here, and a builder in optimizers.py.
OptimizerConfig = (
    Annotated[SGDConfig, tyro.conf.subcommand("sgd")]
    | Annotated[AdamConfig, tyro.conf.subcommand("adam")]
    | Annotated[AdamWConfig, tyro.conf.subcommand("adamw")]
    | Annotated[LBFGSConfig, tyro.conf.subcommand("lbfgs")]
    | Annotated[CAOConfig, tyro.conf.subcommand("cao")]
    | Annotated[AdaHessianConfig, tyro.conf.subcommand("adahessian")]
    | Annotated[SOAPConfig, tyro.conf.subcommand("soap")]
    | Annotated[MuonConfig, tyro.conf.subcommand("muon")]
)


def optimizer_configs() -> dict[str, type[Any]]:
    """Return the dataclasses of the union under the names their configs carry."""
    classes = [get_args(member)[0] for member in get_args(OptimizerConfig)]
    return {cls().name: cls for cls in classes}

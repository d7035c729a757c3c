"""Optimizers of torch and of pytorch_optimizer, most of them a table of settings that are the arguments of a class."""

# ruff: noqa: PLC0415

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.assumptions import ADAM_LR, BASE_LR, CLIP_GRADIENT, WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.loss import BatchLoss
    from cao_lab.runs.stepper import OnRefresh, Stepper


@dataclass(frozen=True)
class FirstOrder(Settings):
    """An optimizer whose step is a gradient, a clip if there is a setting for it, and an update."""

    made_by: ClassVar[str]
    """Module and class."""
    arguments: ClassVar[Mapping[str, str]] = {}
    """What the class calls a setting, where it is another name."""
    is_decay_decoupled: ClassVar[bool] = False
    """Whether the weight decay is no part of the gradient that is clipped."""

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build the class with the settings as its arguments."""
        from cao_lab.runs.stepper import first_order, optimizer_class, trainable

        settings = dict(vars(self))
        clip, decay = settings.pop("max_gradient_norm", None), settings["weight_decay"]
        del settings["name"]
        if "beta1" in settings:
            settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
        named = {self.arguments.get(name, name): value for name, value in settings.items()}
        optimizer = optimizer_class(self.made_by)(trainable(model), **named)
        return first_order(optimizer, clip, 0.0 if self.is_decay_decoupled else decay)


@dataclass(frozen=True)
class SGDConfig(FirstOrder):
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

    made_by = "torch.optim:SGD"


@dataclass(frozen=True)
class AdamConfig(FirstOrder):
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

    made_by = "torch.optim:Adam"


@dataclass(frozen=True)
class AdamWConfig(FirstOrder):
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

    made_by = "torch.optim:AdamW"
    is_decay_decoupled = True


@dataclass(frozen=True)
class AdaGradConfig(FirstOrder):
    """AdaGrad (torch.optim.Adagrad)."""

    name: tyro.conf.Suppress[Literal["adagrad"]] = "adagrad"
    lr: float = 0.01
    """Learning rate."""
    eps: float = 1e-10
    """Added to the denominator."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""

    made_by = "torch.optim:Adagrad"


@dataclass(frozen=True)
class RMSPropConfig(FirstOrder):
    """RMSProp (torch.optim.RMSprop)."""

    name: tyro.conf.Suppress[Literal["rmsprop"]] = "rmsprop"
    lr: float = ADAM_LR
    """Learning rate."""
    alpha: float = 0.99
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""

    made_by = "torch.optim:RMSprop"


@dataclass(frozen=True)
class SOAPConfig(FirstOrder):
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

    made_by = "pytorch_optimizer:SOAP"
    arguments: ClassVar[Mapping[str, str]] = {"update_every": "precondition_frequency"}
    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)


@dataclass(frozen=True)
class ShampooConfig(FirstOrder):
    """Shampoo (pytorch_optimizer): Kronecker factors of the gradient's second moment, one per dimension."""

    name: tyro.conf.Suppress[Literal["shampoo"]] = "shampoo"
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    update_every: int = 1
    """Steps from one preconditioner to the next; it does not move before the first."""

    # The state of its scalable one holds objects, which no checkpoint may.
    made_by = "pytorch_optimizer:Shampoo"
    arguments: ClassVar[Mapping[str, str]] = {"update_every": "preconditioning_compute_steps"}
    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)


@dataclass(frozen=True)
class MuonConfig(Settings):
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

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build pytorch_optimizer's Muon, which is told which weights are hidden."""
        from cao_lab.runs.stepper import first_order, optimizer_class, trainable

        params = trainable(model)
        matrices = [p for p in params if p.ndim >= 2]
        # The first and last layers are not hidden, and go to AdamW with the gains and biases.
        hidden = {id(p) for p in matrices[1:-1]}
        groups = [
            {"params": [p for p in params if id(p) in hidden], "lr": self.lr, "use_muon": True},
            {"params": [p for p in params if id(p) not in hidden], "lr": self.adamw_lr, "use_muon": False},
        ]
        optimizer = optimizer_class("pytorch_optimizer:Muon")(
            [{**group, "weight_decay": self.weight_decay} for group in groups if group["params"]],
            momentum=self.momentum,
        )
        return first_order(optimizer)


@dataclass(frozen=True)
class AdaHessianConfig(Settings):
    """AdaHessian (pytorch_optimizer): Adam on the diagonal of the Hessian, one product per step."""

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

    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)
    can_be_shared: ClassVar[bool] = False

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build pytorch_optimizer's AdaHessian, which takes its products from the graph of the gradients."""
        from torch.autograd import grad

        from cao_lab.runs.stepper import Stepper, optimizer_class, trainable

        optimizer = optimizer_class("pytorch_optimizer:AdaHessian")(
            trainable(model),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            update_period=self.update_every,
        )

        def step(batch_loss: "BatchLoss", _: "OnRefresh") -> None:
            params = optimizer.param_groups[0]["params"]
            gradients = grad(batch_loss(is_differentiated_twice=True), params, create_graph=True)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            optimizer.step()
            # The gradients carry the graph, and the graph the gradients: memory would never be freed.
            optimizer.zero_grad(set_to_none=True)

        def products() -> int:
            steps: int = optimizer.param_groups[0].get("step", 0)
            return -(-steps // self.update_every)

        return Stepper(optimizer, step, hessian_products=products)

    def gradients_per_step(self, product: float) -> float:
        """Return a gradient and the share of a product."""
        return 1.0 + product / self.update_every

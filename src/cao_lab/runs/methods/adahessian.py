"""AdaHessian, of pytorch_optimizer."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.assumptions import WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method, Objective, OnRefresh


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

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build pytorch_optimizer's AdaHessian, which takes its products from the graph of the gradients."""
        from torch.autograd import grad

        from cao_lab.runs.method import Method, baseline, trainable

        optimizer = baseline("AdaHessian")(
            trainable(model),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            update_period=self.update_every,
        )

        def step(objective: "Objective", _: "OnRefresh") -> None:
            params = optimizer.param_groups[0]["params"]
            gradients = grad(objective(is_differentiated_twice=True), params, create_graph=True)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            optimizer.step()
            # The gradients carry the graph, and the graph the gradients: memory would never be freed.
            optimizer.zero_grad(set_to_none=True)

        def products() -> int:
            steps: int = optimizer.param_groups[0].get("step", 0)
            return -(-steps // self.update_every)

        return Method(optimizer, step, hessian_products=products)

    def gradients_per_step(self, product: float) -> float:
        """Return a gradient and the share of a product."""
        return 1.0 + product / self.update_every

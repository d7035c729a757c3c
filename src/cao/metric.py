"""Adam's metric: the diagonal D in which Adam's steps are plain ones, and CAO's sketch is taken."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cao.flat import FlatParams

State = Mapping[Tensor, dict[str, Any]]
Group = Mapping[str, Any]


@dataclass(frozen=True)
class AdamMetric:
    """D = 1/(√v̂ + ε), with v̂ the running mean of squared gradients: without a sketch, the step is exactly Adam's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"AdamMetric needs {name} to be at least 0 and below 1, got {getattr(self, name)!r}")
        if not self.eps > 0:
            raise ValueError(f"AdamMetric needs eps to be positive, got {self.eps!r}")

    @property
    def first_steps(self) -> int:
        """Plain steps before the first sketch: at first, D is huge wherever the first batch has no gradient."""
        return round(1 / (1 - self.beta1))

    def update(self, groups: Sequence[Group], state: State) -> None:
        """Take each gradient into the running means."""
        for group, param in moving(groups):
            own, decay = state[param], 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
            if not own:
                own["step"] = torch.zeros((), dtype=torch.float32)
                own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            gradient: Any = -param.grad if group["maximize"] else param.grad  # type: ignore[operator]
            if decay != 0:
                gradient = gradient.add(param, alpha=decay)
            own["step"] += 1
            own["exp_avg"].lerp_(gradient, 1 - self.beta1)
            own["exp_avg_sq"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)

    def denominator(self, own: Mapping[str, Any]) -> Tensor:
        """Return √v̂ + ε of a parameter."""
        correction = math.sqrt(1 - self.beta2 ** own["step"].item())
        denominator: Tensor = (own["exp_avg_sq"].sqrt() / correction).add_(self.eps)
        return denominator

    def move(self, groups: Sequence[Group], state: State, base: float) -> None:
        """Decay each parameter, and move it by its running mean."""
        for group, param in moving(groups):
            own, lr = state[param], float(group["lr"])
            decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
            if decay != 0:
                param.mul_(1 - lr * decay)
            size = lr * base / (1 - self.beta1 ** own["step"].item())
            param.addcdiv_(own["exp_avg"], self.denominator(own), value=-size)

    def diagonal(self, flat: FlatParams, state: State) -> Float[Tensor, " n"]:
        """Return D; 0 for parameters that have not had a gradient yet, which do not move."""
        # A parameter that has none has an infinite denominator.
        return 1 / flat.entries(
            [self.denominator(state[p]) if state.get(p) else torch.full_like(p, torch.inf) for p in flat.params]
        )


def moving(groups: Sequence[Group]) -> Iterator[tuple[Group, Tensor]]:
    """Yield each parameter that has a gradient, with its group."""
    for group in groups:
        yield from ((group, param) for param in group["params"] if param.grad is not None)

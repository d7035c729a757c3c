"""The edge of stability of torch's optimizers: how far a step answers a gradient that changes sign at every step.

Along one direction of curvature h, with its preconditioner held still, each of these optimizers is a linear recursion
θ ← (1 − δ)θ − T(g), and loses its stability where a mode that changes sign at every step no longer shrinks: at
h·T(−1) = 2 − δ, where T(−1) is its answer to such a gradient (docs/theory.md, section 10).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from cao.linalg.columns import in_float64, precise
from cao.linalg.flat import FlatParams, local

Group = Mapping[str, Any]
State = Mapping[str, Any]
Number = float | Tensor
Answer = tuple[Number, Tensor | None]
"""T(−1)/(2 − δ) of a parameter, as a number and a preconditioner D to multiply it by; None is the identity."""


class Metric(NamedTuple):
    """The curvature that an optimizer feels is D^½(H + Ω)D^½; it is stable while the largest eigenvalue is below edge.

    Where groups have different rates, D has the rates relative to the largest.
    """

    diagonal: float | Float[Tensor, " n"]
    """D."""
    decay: float | Float[Tensor, " n"]
    """Ω, which weight decay adds to the curvature where it goes through the gradient."""
    edge: float
    """NaN for an optimizer that is not known."""


def sgd(group: Group, state: State) -> Answer:
    """SGD, with momentum, dampening or Nesterov's form of momentum."""
    beta, lr = group["momentum"], group["lr"]
    buffer = (1 - group["dampening"]) / (1 + beta) if beta else 1.0
    return lr * (1 + beta * buffer if group["nesterov"] else buffer) / 2, None


def adam(group: Group, state: State) -> Answer:
    """Adam, with AMSGrad or decoupled weight decay, too."""
    beta1, coming = group["betas"][0], state["step"] + 1
    rate = group["lr"] / (1 - beta1**coming) * averaged(beta1)
    return rate / turn(group), 1 / root(group, state, state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])


def nadam(group: Group, state: State) -> Answer:
    """NAdam, which adds the gradient to its running mean."""
    beta1, decay, coming = group["betas"][0], group["momentum_decay"], state["step"] + 1
    now, following = (beta1 * (1 - 0.5 * 0.96 ** (step * decay)) for step in (coming, coming + 1))
    product = state["mu_product"] * now
    gain = (1 - now) / (1 - product) + following / (1 - product * following) * averaged(beta1)
    return group["lr"] * gain / turn(group), 1 / root(group, state, state["exp_avg_sq"])


def radam(group: Group, state: State) -> Answer:
    """RAdam: momentum alone in its first steps, then Adam with a rate that rises."""
    beta1, beta2 = group["betas"]
    coming = float(state["step"]) + 1
    rate = group["lr"] / (1 - beta1**coming) * averaged(beta1) / turn(group)
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * coming * beta2**coming / (1 - beta2**coming)
    if length <= 5:
        return rate, None
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    bare = {"betas": group["betas"], "eps": group["eps"] / (1 - beta2**coming) ** 0.5}  # Its ε is not corrected.
    return rate * rectified**0.5, 1 / root(bare, state, state["exp_avg_sq"])


def adamax(group: Group, state: State) -> Answer:
    """Adamax."""
    beta1 = group["betas"][0]
    return group["lr"] / (1 - beta1 ** (state["step"] + 1)) * averaged(beta1) / 2, 1 / state["exp_inf"]


def rmsprop(group: Group, state: State) -> Answer:
    """RMSprop, centred or with momentum, too."""
    square = state["square_avg"]
    if group["centered"]:
        square = square - state["grad_avg"].square()
    return group["lr"] / (1 + group["momentum"]) / 2, 1 / (square.sqrt() + group["eps"])


def adagrad(group: Group, state: State) -> Answer:
    """Adagrad."""
    rate = group["lr"] / (1 + state["step"] * group["lr_decay"])
    return rate / 2, 1 / (state["sum"].sqrt() + group["eps"])


def averaged(beta: float) -> float:
    """Return what a running mean makes of numbers that change sign at every step."""
    return (1 - beta) / (1 + beta)


def turn(group: Group) -> Number:
    """Return 2 − δ, where decoupled weight decay shrinks a parameter by δ per step."""
    return 2 - group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 2.0


def root(group: Group, state: State, square: Tensor) -> Tensor:
    """Return √v̂ + ε, of the steps so far: what a gradient of the usual size leaves v̂ at."""
    return (square / (1 - group["betas"][1] ** state["step"])).sqrt() + group["eps"]  # type: ignore[no-any-return]


EDGES: dict[str, Callable[[Group, State], Answer]] = {
    "SGD": sgd, "Adam": adam, "AdamW": adam, "NAdam": nadam, "RAdam": radam, "Adamax": adamax, "RMSprop": rmsprop,
    "Adagrad": adagrad,
}  # fmt: skip
"""The optimizers whose edge is known, by the names of torch's classes."""


def known_as(optimizer: Optimizer) -> str | None:
    """Return the name under which the edge of an optimizer is known: that of torch's class whose step it takes."""
    step = type(optimizer).step
    name = step.__qualname__.split(".")[0]  # Not the class's: a class that steps in another way is another optimizer.
    return name if step.__module__.startswith("torch.optim") and name in EDGES else None


def is_ready(optimizer: Optimizer, name: str | None, steps: int) -> bool:
    """Whether the optimizer has seen so many gradients that its preconditioner means something."""
    if name is None or name == "SGD":
        return True
    return any(float(own.get("step", 0)) >= steps for own in optimizer.state.values())


def metric_of(optimizer: Optimizer, name: str | None, flat: FlatParams) -> Metric:
    """Return the metric of the coming step; plain, and with no edge, for an optimizer that is not known."""
    if name is None:
        return Metric(1.0, 0.0, torch.nan)
    groups = {p: {**group, "decoupled_weight_decay": is_decoupled(group, name)}
              for group in optimizer.param_groups for p in group["params"]}  # fmt: skip
    answers = [answer_of(name, groups[p], optimizer.state.get(p, {})) for p in flat.params]
    decays = [0.0 if groups[p]["decoupled_weight_decay"] else groups[p].get("weight_decay", 0.0) for p in flat.params]
    # One tensor, so that the device is asked once.
    best = precise(flat.device)
    rates = in_float64(torch.stack([torch.as_tensor(rate, dtype=best, device=flat.device) for rate, _ in answers]))
    largest = float(rates.max())
    shares = rates / (largest or 1.0)
    edge = 1 / largest if largest else torch.inf
    if len({*decays}) == 1 and all(d is None for _, d in answers) and bool((shares == 1).all()):
        return Metric(1.0, decays[0], edge)
    diagonals = [
        share * (torch.ones_like(piece) if d is None else d)
        for piece, share, (_, d) in zip(flat.pieces, shares, answers, strict=True)
    ]
    added = [torch.full_like(piece, decay) for piece, decay in zip(flat.pieces, decays, strict=True)]
    return Metric(flat.entries(diagonals), flat.entries(added) if any(decays) else 0.0, edge)


def answer_of(name: str, group: Group, state: State) -> Answer:
    """Return a parameter's answer; none of one that has not had a gradient yet, and does not move."""
    if name != "SGD" and not state:
        return 0.0, None
    return EDGES[name](group, {key: held(value) for key, value in state.items()})


def held(value: Any) -> Any:
    """Return what this process holds of a part of the state; counts of steps are too coarse for a power of 0.999."""
    piece = local(value) if isinstance(value, Tensor) else value
    return piece.to(precise(piece.device)) if isinstance(piece, Tensor) and piece.ndim == 0 else piece


def is_decoupled(group: Group, name: str) -> bool:
    """Whether weight decay shrinks the parameters directly; torch before 2.6 has no flag for it in AdamW."""
    return bool(group.get("decoupled_weight_decay", name == "AdamW"))

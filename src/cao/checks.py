"""What CAO's settings and parameters must satisfy, checked once, when they are passed in."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor

from cao.linalg.eigensolvers import SOLVERS, Solver
from cao.linalg.flat import is_spread
from cao.rules.damping import DAMPINGS, AtTheEdge, Damping
from cao.rules.rank import RANKS, Rank
from cao.rules.refresh import REFRESHES, Refresh
from cao.rules.rules import SHARED, rule_of
from cao.sketch.damped import NegativeCurvature, Scaling


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work, saying what is wrong and what was passed."""
    rank, refresh, damping = settings["rank"], settings["refresh_every"], settings["damping"]
    solver, momentum = settings["eigensolver"], settings["momentum"]
    limit = settings["max_update_norm"]
    for name, is_fine, wanted in (
        ("lr", is_number(settings["lr"]) and settings["lr"] >= 0, "a finite nonnegative number"),
        ("rank", is_policy(rank, Rank, RANKS) or is_whole(rank), f"a nonnegative whole number or {words(RANKS)}"),
        (
            "refresh_every",
            is_policy(refresh, Refresh, REFRESHES) or is_count(refresh),
            f"at least 1, or {words(REFRESHES)}",
        ),
        ("damping", is_policy(damping, Damping, DAMPINGS) or is_positive(damping), f"positive or {words(DAMPINGS)}"),
        ("power_iterations", is_whole(settings["power_iterations"]), "a nonnegative whole number"),
        ("max_update_norm", limit is None or is_positive(limit), "positive or None"),
        ("momentum", is_number(momentum) and 0 <= momentum < 1, "at least 0 and below 1"),
        ("nesterov", not settings["nesterov"] or momentum > 0, "False without momentum"),
        ("weight_decay", is_number(settings["weight_decay"]) and settings["weight_decay"] >= 0, "a nonnegative number"),
        ("seed", isinstance(settings["seed"], Integral), "a whole number"),
        ("eigensolver", solver is None or is_policy(solver, Solver, SOLVERS), words(SOLVERS)),
        *(
            (
                name,
                settings[name] is None or settings[name] in get_args(options),
                f"one of {', '.join(get_args(options))}",
            )
            for name, options in (("negative_curvature", NegativeCurvature), ("scaling", Scaling))
        ),
    ):
        if not is_fine:
            raise ValueError(f"{name} must be {wanted}, got {settings[name]!r}")
    if settings["negative_curvature"] == "signed" and momentum != 0:
        raise ValueError(
            f'negative_curvature="signed" needs momentum to be 0, got {momentum!r}: where λ < 0 the signed rule would '
            "amplify the momentum at every step"
        )
    if isinstance(rule_of("damping", settings["damping"]), AtTheEdge) and settings["scaling"] == "inverse-damping":
        raise ValueError('damping="auto" needs scaling to be "unit", got \'inverse-damping\'')


def check_one_sketch(group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse a group with other settings of the sketch than the first group has."""
    for name in SHARED:
        if group[name] != first[name]:
            raise ValueError(
                f"{name} must be the same in all parameter groups, because one sketch covers them all; "
                f"got {group[name]} after {first[name]}"
            )


def words(rules: Mapping[str, Any]) -> str:
    """Return the words for rules as a message names them."""
    return " or ".join(f'"{word}"' for word in rules)


def is_policy(value: object, protocol: type, words: Mapping[str, Any]) -> bool:
    """Whether the value is a policy of this kind, or one of the words that stand for one."""
    return value in words if isinstance(value, str) else isinstance(value, protocol)


def is_count(value: object) -> bool:
    """Whether the value is a whole number of at least 1."""
    return is_whole(value) and int(value) >= 1  # type: ignore[call-overload]


def is_whole(value: object) -> bool:
    """Whether the value is a nonnegative whole number, of Python or numpy; True and False do not count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number, of Python or numpy, or a tensor of one, as a learning rate may be."""
    is_one = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_one and math.isfinite(float(value))  # type: ignore[arg-type]


def is_numpy_number(value: object) -> bool:
    """Whether the value is a numpy number; the library does not import numpy."""
    return isinstance(value, Real) and hasattr(value, "item")


def is_positive(value: object) -> bool:
    """Whether the value is a positive number."""
    return is_number(value) and bool(value > 0)


def check_unknown(options: Mapping[str, Any]) -> None:
    """Refuse options that CAO does not have, with the reason if they are those of torch.optim.SGD or were ours."""
    reasons = {
        "dampening": "momentum is undamped here; scale lr instead",
        "foreach": "small parameters are always stepped together, and large ones in stretches that fit the cache",
        "fused": "there is no fused kernel for a step with a sketch",
        "differentiable": "the step cannot be differentiated through",
        "maximize": "pass the negative of what is to grow, to backward and to refresh_if_due",
        "metric": "Adam's metric was retired (docs/notebook.md)",
        "tolerance": "give it to the eigensolver, as in eigensolver=SubspaceIteration(30, tolerance=1e-3)",
        "decoupled_weight_decay": "multiply the parameters by 1 - lr * weight_decay before the step instead",
        "warmup_steps": 'group["rank"], group["scaling"] = 0, "unit" makes the steps SGD\'s, and may be changed later',
        "keep_sketch": "the sketch is kept until the next one is found",
        "skip_non_finite": "a step whose gradient is not finite is taken without the sketch",
    }
    for name, value in options.items():
        if name not in reasons:
            raise TypeError(f"CAO has no option {name!r}; help(CAO) lists those it has")
        # A default, spelt out, asks for nothing.
        if bool(value) != (name == "keep_sketch"):
            raise ValueError(f"{name}={value!r} is not supported: {reasons[name]}; leave it out")


def check_parameters(params: Sequence[Tensor], device: torch.device | None) -> None:
    """Refuse parameters that one sketch on one device cannot cover."""
    for param in params:
        if param.device != device:
            raise ValueError(f"all parameters must be on one device, got {device}, {param.device}")
        if param.is_meta:
            raise ValueError("parameters must hold data, got one on the meta device; use model.to_empty(device=...)")
        if param.is_complex():
            raise ValueError(f"parameters must be real, got one of {param.dtype}; use torch.view_as_real")
        if not param.is_floating_point() or param.dtype.itemsize == 1:
            raise ValueError(f"parameters must be float16 or wider, got one of {param.dtype}; keep a wider master copy")
        if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                "FullyShardedDataParallel is not supported; use fully_shard (FSDP2) or DistributedDataParallel"
            )
        if is_spread(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
            raise ValueError(f"parameters must be sharded or replicated, got one placed {param.placements}")  # type: ignore[attr-defined]

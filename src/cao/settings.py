"""What CAO's settings and parameters must satisfy, checked once, at the border."""

import math
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor

from cao.policies import Damping, Refresh, Solver
from cao.preconditioner import NegativeCurvature, Scaling

# What the groups of one optimizer share, because there is one sketch over all of them.
SKETCH_SETTINGS = (
    "rank", "refresh_every", "damping", "power_iterations", "tolerance", "warm_start", "eigensolver",
    "negative_curvature", "scaling", "max_update_norm", "warmup_steps", "maximize", "seed", "skip_non_finite",
    "nesterov",
)  # fmt: skip


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work, saying what was wrong and what was got."""
    damping, refresh, solver = settings["damping"], settings["refresh_every"], settings["eigensolver"]
    tolerance, limit, momentum = settings["tolerance"], settings["max_update_norm"], settings["momentum"]
    for name, is_fine, wanted in (
        ("lr", is_number(settings["lr"]) and settings["lr"] >= 0, "a finite nonnegative number"),
        ("rank", is_whole(settings["rank"]), "a nonnegative whole number"),
        ("refresh_every", isinstance(refresh, Refresh) or (is_whole(refresh) and refresh >= 1), "at least 1"),
        ("damping", isinstance(damping, Damping) or damping == "auto" or is_positive(damping), 'positive or "auto"'),
        ("power_iterations", is_whole(settings["power_iterations"]), "a nonnegative whole number"),
        ("tolerance", tolerance is None or is_positive(tolerance), "positive or None"),
        ("max_update_norm", limit is None or is_positive(limit), "positive or None"),
        ("momentum", is_number(momentum) and 0 <= momentum < 1, "at least 0 and below 1"),
        ("nesterov", not settings["nesterov"] or momentum > 0, "False where there is no momentum"),
        ("weight_decay", is_number(settings["weight_decay"]) and settings["weight_decay"] >= 0, "a nonnegative number"),
        ("warmup_steps", is_whole(settings["warmup_steps"]), "a nonnegative whole number"),
        ("seed", isinstance(settings["seed"], Integral), "a whole number"),
        ("eigensolver", isinstance(solver, Solver) or solver in ("subspace", "lanczos"), "one of subspace, lanczos"),
        *(
            (name, settings[name] in get_args(options), f"one of {', '.join(get_args(options))}")
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
    if settings["damping"] == "auto":
        check_automatic_damping(settings)


def is_whole(value: object) -> bool:
    """Whether the value is a nonnegative whole number, of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number, of Python or numpy, or a tensor of one, as a learning rate may be."""
    is_one = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_one and math.isfinite(float(value))  # type: ignore[arg-type]


def is_numpy_number(value: object) -> bool:
    """Whether the value is a number of numpy, which the library does not import."""
    return isinstance(value, Real) and hasattr(value, "item")


def is_positive(value: object) -> bool:
    """Whether the value is a positive number."""
    return is_number(value) and bool(value > 0)


def check_automatic_damping(settings: dict[str, Any]) -> None:
    """Refuse settings with which the automatic damping has no meaning."""
    for name, is_fine, wanted in (
        ("rank", settings["rank"] >= 1, "at least 1"),
        ("scaling", settings["scaling"] == "inverse-damping", '"inverse-damping"'),
        ("negative_curvature", settings["negative_curvature"] != "signed", '"magnitude" or "clip"'),
        ("warmup_steps", settings["warmup_steps"] == 0, "0"),
    ):
        if not is_fine:
            raise ValueError(f'damping="auto" needs {name} to be {wanted}, got {settings[name]!r}')


def check_unsupported(**options: Any) -> None:
    """Refuse what torch.optim.SGD takes and CAO does not, with the reason."""
    reasons = {
        "dampening": "momentum is undamped here; scale lr instead",
        "foreach": "small parameters are always stepped together, and large ones in stretches that fit the cache",
        "fused": "there is no fused kernel for a step with a sketch",
        "differentiable": "the step cannot be differentiated through",
    }
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {reasons[name]}; leave it out")


def check_parameters(params: Sequence[Tensor], device: torch.device) -> None:
    """Refuse parameters that one sketch on one device cannot cover."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
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
            raise ValueError("FullyShardedDataParallel is not supported; use DistributedDataParallel")
        if tensor_module is not None and isinstance(param, tensor_module.DTensor):
            raise ValueError("sharded parameters (DTensor) are not supported yet; use DistributedDataParallel")


def check_gradients(params: Sequence[Tensor]) -> None:
    """Refuse gradients that cannot be multiplied by a preconditioner."""
    if any(p.grad is not None and p.grad.is_sparse for p in params):
        raise ValueError("CAO needs dense gradients, got a sparse one; build the embedding with sparse=False")

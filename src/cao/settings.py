"""What CAO's settings, parameters and ready sketches must satisfy, checked once, at the border."""

import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

import torch
from torch import Tensor

from cao.linalg import Eigenpairs, inner_products
from cao.preconditioner import NegativeCurvature, Scaling

Eigensolver: TypeAlias = Literal["subspace", "lanczos"]

# What the groups of one optimizer share, because there is one sketch over all of them.
SKETCH_SETTINGS = (
    "rank", "refresh_every", "damping", "power_iterations", "tolerance", "warm_start", "eigensolver",
    "negative_curvature", "scaling", "max_update_norm", "warmup_steps", "maximize", "seed",
)  # fmt: skip


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work, saying what was wrong and what was got."""
    for name, is_fine, wanted in (
        ("lr", is_number(settings["lr"]) and settings["lr"] >= 0, "a nonnegative number"),
        ("rank", is_whole(settings["rank"]), "a nonnegative whole number"),
        ("refresh_every", is_whole(settings["refresh_every"]) and settings["refresh_every"] >= 1, "at least 1"),
        ("damping", settings["damping"] == "auto" or is_positive(settings["damping"]), 'positive or "auto"'),
        ("power_iterations", is_whole(settings["power_iterations"]), "a nonnegative whole number"),
        ("tolerance", settings["tolerance"] is None or is_positive(settings["tolerance"]), "positive or None"),
        (
            "max_update_norm",
            settings["max_update_norm"] is None or is_positive(settings["max_update_norm"]),
            "positive or None",
        ),
        ("momentum", is_number(settings["momentum"]) and 0 <= settings["momentum"] < 1, "at least 0 and below 1"),
        ("weight_decay", is_number(settings["weight_decay"]) and settings["weight_decay"] >= 0, "a nonnegative number"),
        ("warmup_steps", is_whole(settings["warmup_steps"]), "a nonnegative whole number"),
        ("seed", isinstance(settings["seed"], int), "a whole number"),
        *(
            (name, settings[name] in get_args(options), f"one of {', '.join(get_args(options))}")
            for name, options in (
                ("eigensolver", Eigensolver),
                ("negative_curvature", NegativeCurvature),
                ("scaling", Scaling),
            )
        ),
    ):
        if not is_fine:
            raise ValueError(f"{name} must be {wanted}, got {settings[name]!r}")
    if settings["damping"] == "auto":
        check_automatic_damping(settings)


def is_whole(value: object) -> bool:
    """Whether the value is a nonnegative whole number."""
    return isinstance(value, int) and value >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a number, of Python or numpy, or a tensor, as a learning rate may be."""
    return isinstance(value, Real | Tensor)


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


def check_parameters(params: Sequence[Tensor]) -> None:
    """Refuse parameters that one sketch cannot cover."""
    devices = {str(p.device) for p in params}
    if len(devices) > 1:
        raise ValueError(f"all parameters must be on one device, got {', '.join(sorted(devices))}")
    tensor_module = sys.modules.get("torch.distributed.tensor")
    for param in params:
        if param.is_complex():
            raise ValueError(f"parameters must be real, got one of {param.dtype}; use torch.view_as_real")
        if tensor_module is not None and isinstance(param, tensor_module.DTensor):
            raise ValueError("sharded parameters (DTensor) are not supported yet; use DistributedDataParallel")


def check_gradients(params: Sequence[Tensor]) -> None:
    """Refuse gradients that cannot be multiplied by a preconditioner."""
    if any(p.grad is not None and p.grad.is_sparse for p in params):
        raise ValueError("CAO needs dense gradients, got a sparse one; build the embedding with sparse=False")


def check_eigenpairs(pairs: Eigenpairs, size: int, rank: int) -> None:
    """Refuse ready eigenpairs of other shapes, or with vectors that are not orthonormal; let non-finite ones pass."""
    for name, wanted in (("vectors", (size, rank)), ("values", (rank,)), ("residuals", (rank,))):
        got = tuple(getattr(pairs, name).shape)
        if got != wanted:
            raise ValueError(f"Eigenpairs must have {name} of shape {wanted}, got {got}")
    error = float((inner_products(pairs.vectors, pairs.vectors) - torch.eye(rank).to(pairs.vectors.device)).abs().max())
    if error > 1e-3:
        raise ValueError(
            f"Eigenpairs must have orthonormal vectors, got VᵀV off by {error:.2g}; torch.linalg.qr makes them so"
        )

"""State dicts: an optimizer's settings, progress and sketch as plain numbers and tensors, and back again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cao.linalg import eigensolvers
from cao.linalg.flat import FlatParams, storage_order
from cao.rules import damping, rank, refresh
from cao.sketch.sketch import Progress, Sketch

# The format of saved progress.
FORMAT = 3
# A parameter's share of each eigenvector is saved with the parameter, under this name and a number.
VECTOR = "vector_"

# What ends with the process, and the sketch, which is saved in parts.
NOT_SAVED = ("sketch", "source_gradient", "parts")

SAVED: dict[str, Any] = {
    name: each
    for module in (damping, rank, refresh, eigensolvers)
    for name, each in vars(module).items()
    if is_dataclass(each) and isinstance(each, type) and each.__module__ == module.__name__
}
"""What a state dict can rebuild: all rules of ours, their states, and eigensolvers."""

RULES = ("rank", "refresh_every", "damping", "eigensolver")
"""The settings that may be a rule or a solver of a user's own, of which only the name is saved."""


@contextmanager
def hooked_load(
    optimizer: Optimizer, check: Callable[[Optimizer, dict[str, Any]], Any], restore: Callable[[Optimizer], None]
) -> Iterator[None]:
    """Let a state be checked after all hooks that may change it, and be restored before any that may look at it."""
    handles = [
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def plain(value: Any) -> Any:
    """Return a rule of ours, or the state of one, as its name and its fields; anything else as it is."""
    return {"policy": type(value).__name__, **asdict(value)} if type(value) in SAVED.values() else value


def name_of(value: Any) -> str:
    """Return the name of a rule's class, or of a function."""
    return getattr(value, "__name__", type(value).__name__)


def plain_setting(name: str, value: Any) -> Any:
    """Return a setting as plain data for a state dict."""
    saved = plain(value)
    is_own = name in RULES and saved is value and not (value is None or isinstance(value, str | Real | Tensor))
    return {"policy": name_of(value)} if is_own else saved


def restored(saved: Any, own: Any = None) -> Any:
    """Return what `plain` made plain data of; of a user's own rule the one that the optimizer was constructed with."""
    if not isinstance(saved, dict) or "policy" not in saved:
        return saved
    fields = {name: value for name, value in saved.items() if name != "policy"}
    if saved["policy"] in SAVED:
        return SAVED[saved["policy"]](**fields)
    if name_of(own) != saved["policy"]:
        raise ValueError(
            f"the state dict names the policy {saved['policy']!r}, which is not one of ours; if it is one of your own, "
            "construct the optimizer with it before load_state_dict"
        )
    return own


def add_progress(saved: dict[str, Any], progress: Progress, params: Sequence[Tensor]) -> None:
    """Complete a state dict of torch's: settings as plain data, progress, and the vectors shaped like parameters."""
    groups, sketch = saved["param_groups"], progress.sketch
    for group in groups:
        group.update({name: plain_setting(name, value) for name, value in group.items()})
    numbers = {name: value for name, value in vars(progress).items() if name not in NOT_SAVED}
    groups[0]["progress"] = numbers | {
        "format": FORMAT,
        "non_finite_steps": int(progress.non_finite_steps),
        "has_warned": list(progress.has_warned),
        "damping": plain(progress.damping),
        "seen": plain(progress.seen),
        "values": sketch.values if sketch else [],
        "residuals": sketch.residuals if sketch else [],
        "eta": sketch.damping if sketch else 0.0,
        "refreshed_at": sketch.step if sketch else -1,
    }
    wanted = groups[0]["rank"] if isinstance(groups[0]["rank"], int) else 0
    shares = shares_of(sketch) if sketch else places_for_shares(params, wanted)
    for index, param in enumerate(params):
        if param in shares:
            saved["state"][index] = {**saved["state"].get(index, {}), **shares[param]}


def shares_of(sketch: Sketch) -> dict[Tensor, dict[str, Tensor]]:
    """Return each parameter's share of the vectors, shaped like it."""
    shares: dict[Tensor, dict[str, Tensor]] = {param: {} for param in sketch.storage.params}
    for index, row in enumerate(sketch.rows):
        for param, part in zip(sketch.storage.params, sketch.storage.split(row, row.dtype), strict=True):
            shares[param][f"{VECTOR}{index}"] = part
    return shares


def places_for_shares(params: Sequence[Tensor], count: int) -> dict[Tensor, dict[str, Tensor]]:
    """Return zeros, which hold the place of a sketch to come."""
    names, dtype = [f"{VECTOR}{index}" for index in range(count)], FlatParams(params).dtype
    return {p: {name: torch.zeros_like(p, dtype=dtype) for name in names} for p in params if p.requires_grad}


def without_progress(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return what torch is to load of a state dict: rules instead of their names, and no vectors.

    torch casts all that it loads to the parameters' dtype, which would coarsen the sketch of a bfloat16 model.
    """
    groups = [
        {name: restored(value, ours.get(name)) for name, value in group.items() if name != "progress"}
        for group in saved["param_groups"]
    ]
    state = {
        index: {name: value for name, value in entries.items() if not is_share(name)}
        for index, entries in saved["state"].items()
    }
    return {**saved, "param_groups": groups, "state": state}


def is_share(name: object) -> bool:
    """Whether an entry of a parameter's state is its share of an eigenvector."""
    return isinstance(name, str) and name.startswith(VECTOR)


def check_saved(saved: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """Refuse a state dict of another optimizer or another model, or one that is not whole, before any is loaded."""
    if not any("values" in group.get("progress", ()) for group in saved.get("param_groups", ())):
        raise ValueError("the state dict must be one of CAO, got one of another optimizer")
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    # Another number of parameters is torch's to refuse.
    for index, param in zip(indices, params, strict=False):
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.shape not in (param.shape, ()):
                raise ValueError(
                    f"the state dict is of another model: its {name} of parameter {index} has the shape "
                    f"{tuple(value.shape)}, the parameter {tuple(param.shape)}"
                )
    vectors = len(progress_in(saved)["values"])
    shares = {sum(map(is_share, entries)) for entries in saved["state"].values()} - {0}
    if vectors and shares != {vectors}:
        raise ValueError(
            "the state dict has the eigenvalues of a sketch but not all of its vectors; save optimizer.state_dict() "
            "whole"
        )


def progress_in(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the saved progress, which stand in one of the groups."""
    return next(group["progress"] for group in saved["param_groups"] if "progress" in group)


def load_progress(saved: Mapping[str, Any], progress: Progress, params: Iterable[Tensor]) -> None:
    """Take over saved progress, in place; what an older version did not save starts anew."""
    numbers = progress_in(saved)
    for name, value in vars(Progress()).items():
        setattr(progress, name, restored(numbers.get(name, value)))
    progress.has_warned = list(numbers["has_warned"])
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    entries = {param: saved["state"].get(index, {}) for index, param in zip(indices, params, strict=True)}
    shares = {param: own for param, own in entries.items() if any(map(is_share, own))}
    progress.sketch = loaded_sketch(numbers, shares) if numbers["values"] else None


def loaded_sketch(numbers: Mapping[str, Any], shares: Mapping[Tensor, Mapping[str, Tensor]]) -> Sketch:
    """Return the sketch whose numbers and whose shares, by parameter, were saved."""
    params = FlatParams(shares)
    storage = FlatParams(storage_order(params.params))
    rows = torch.zeros(len(numbers["values"]), storage.length, dtype=storage.dtype, device=storage.device)
    for index, row in enumerate(rows):
        row.copy_(storage.join([shares[param][f"{VECTOR}{index}"] for param in storage.params]))
    return Sketch(
        values=list(numbers["values"]),
        residuals=list(numbers["residuals"]),
        damping=numbers.get("eta", 0.0),
        step=numbers["refreshed_at"],
        params=params,
        rows=rows,
    )

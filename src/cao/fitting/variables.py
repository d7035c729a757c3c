"""What is fitted: parameters by name, where they are, and the box that they must stay in."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.fitting.box import Box
from cao.linalg.flat import FlatParams

Named: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]
Limit: TypeAlias = float | Tensor | None
Bounds: TypeAlias = Mapping[Tensor, tuple[Limit, Limit]] | Mapping[str, tuple[Limit, Limit]]


class Variables:
    """Parameters by name as one vector in float64 on the CPU, with a lower and an upper bound for each number."""

    def __init__(self, params: Named, bounds: Bounds | None = None) -> None:
        self.named = {name: p for name, p in named(params).items() if p.requires_grad}
        if not self.named:
            raise ValueError("fit needs a parameter that requires a gradient, got none; call requires_grad_() on it")
        self.params = list(self.named.values())
        self.flat = FlatParams(self.params)
        self.box = self._limits(bounds or {})

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.flat.length

    @property
    def has_bounds(self) -> bool:
        """Whether any number has a bound."""
        return bool((self.box.low.isfinite() | self.box.high.isfinite()).any())

    def position(self) -> Float[Tensor, " n"]:
        """Return where the parameters are."""
        return self.flat.join(self.params).double().cpu()

    @torch.no_grad()
    def move(self, position: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Move the parameters there, within their box, and return where they are in their own precision."""
        inside = position.clamp(self.box.low, self.box.high)
        for p, part in zip(self.params, self.flat.split(inside.to(self.flat.device)), strict=True):
            p.copy_(part)
        return self.position()

    def is_on_bound(self) -> dict[str, bool]:
        """Say which parameters have a number at its bound."""
        here = self.position()
        held = ((here <= self.box.low) | (here >= self.box.high)).split(self.flat.sizes)
        return {name: bool(part.any()) for name, part in zip(self.named, held, strict=True)}

    def where(self, chosen: Iterable[str | Tensor]) -> tuple[list[str], Tensor]:
        """Return the names of chosen parameters, and the places of their numbers in the vector."""
        names = [self.name_of(key, "a chosen parameter") for key in chosen]
        places = dict(zip(self.named, torch.arange(self.size).split(self.flat.sizes), strict=True))
        return names, torch.cat([places[name] for name in names])

    def name_of(self, key: object, what: str) -> str:
        """Return the name of a parameter that is given by name or as a tensor."""
        for name, p in self.named.items():
            if p is key or (isinstance(key, str) and name == key):
                return name
        shown = repr(key) if isinstance(key, str) else f"a {type(key).__name__}"
        raise ValueError(f"{what} must be one of params ({', '.join(self.named)}) or its name, got {shown}")

    def _limits(self, bounds: Bounds) -> Box:
        """Return all bounds, checked."""
        pairs = {self.name_of(key, "a key of bounds"): pair for key, pair in bounds.items()}
        lows, highs = [], []
        for name, p in self.named.items():
            low, high = limits(name, p, pairs.get(name, (None, None)))
            check_limits(name, p.detach().double().cpu(), low, high)
            lows.append(low.flatten())
            highs.append(high.flatten())
        return Box(torch.cat(lows), torch.cat(highs))


def named(params: Named) -> dict[str, Tensor]:
    """Return parameters by name; those without one are called p0, p1 and so on."""
    if isinstance(params, Tensor):
        raise TypeError("params must be several tensors, as for an optimizer, got one; pass [tensor] or {name: tensor}")
    pairs: list[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not all(isinstance(pair, tuple) for pair in pairs):
        pairs = [(f"p{index}", p) for index, p in enumerate(pairs)]
    for name, p in pairs:
        if not isinstance(p, Tensor):
            raise TypeError(f"params must be tensors, got {type(p).__name__} as {name}; pass torch.tensor(…)")
        if p.requires_grad and not p.is_leaf:
            raise ValueError(f"{name} is computed from other tensors; pass those, or detach it and compute with that")
    found: dict[str, Tensor] = {}
    for name, p in pairs:
        if not any(p is other for other in found.values()):
            found[str(name)] = p
    return found


def limits(name: str, p: Tensor, pair: object) -> tuple[Tensor, Tensor]:
    """Return the bounds of a parameter, a number for each of its entries, as they are in its own precision."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ValueError(f"bounds of {name} must be (lower, upper), with None for no bound; got {pair!r}")
    sides = []
    for side, missing in zip(pair, (-math.inf, math.inf), strict=True):
        value = torch.as_tensor(missing if side is None else side, dtype=p.dtype).detach()
        try:
            sides.append(value.cpu().double().expand(p.shape))
        except RuntimeError:
            raise ValueError(
                f"bounds of {name} must be numbers or have its shape {tuple(p.shape)}, got {tuple(value.shape)}"
            ) from None
    return sides[0], sides[1]


def check_limits(name: str, value: Tensor, low: Tensor, high: Tensor) -> None:
    """Refuse bounds that cross or that exclude the start."""
    if bool((low.isnan() | high.isnan()).any()):
        raise ValueError(f"bounds of {name} must be numbers, got NaN; None stands for no bound")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} is not finite at the start; choose a value for it")
    if bool((low >= high).any()):
        at = (low >= high).flatten().nonzero()[0, 0]
        raise ValueError(
            f"bounds of {name} must have lower < upper, got ({low.flatten()[at]:g}, {high.flatten()[at]:g}); to hold a "
            "parameter, call requires_grad_(False) on it"
        )
    outside = (value < low) | (value > high)
    if bool(outside.any()):
        at = outside.flatten().nonzero()[0, 0]
        raise ValueError(
            f"{name} starts at {value.flatten()[at]:g}, outside its bounds ({low.flatten()[at]:g}, "
            f"{high.flatten()[at]:g}); start it inside"
        )

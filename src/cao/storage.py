"""Where the sketch lives: in one matrix, of which each parameter's state shows its share."""

from collections.abc import Iterable, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

State = MutableMapping[Tensor, dict[str, Any]]

# Parameters of no more numbers than this are small: a call costs more than a copy of them.
SMALL = 1 << 14


class Layout:
    """The rows of the sketch in storage order, and where in them each parameter begins."""

    def __init__(self, params: Sequence[Tensor], rows: Float[Tensor, "k n"]) -> None:
        self.params = storage_order(params)
        self.rows = rows
        if any(param is not other for param, other in zip(params, self.params, strict=True)):
            share_of = dict(zip(params, shares(rows, params), strict=True))
            self.rows = torch.cat([share_of[param] for param in self.params], dim=1)
        self.places = dict(zip(self.params, accumulate((p.numel() for p in self.params), initial=0), strict=False))


def storage_order(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the small parameters behind the others, so that they are neighbours and move in few calls.

    Behind, because sizes of large ones are mostly round, and their shares of the sketch stay aligned in memory.
    """
    return sorted(params, key=lambda param: param.numel() <= SMALL)


def sketch_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Return the precision of the sketch: float64 if any parameter has it, else float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def stored_rows(state: State, params: Sequence[Tensor], rank: int) -> Float[Tensor, "k n"]:
    """Return the sketched vectors over these parameters, as rows; zero where a parameter has none."""
    rows = torch.zeros(rank, sum(p.numel() for p in params), dtype=sketch_dtype(params), device=params[0].device)
    for param, share in zip(params, shares(rows, params), strict=True):
        for index, piece in enumerate(share):
            if f"vector_{index}" in state[param]:
                piece.view(param.shape).copy_(state[param][f"vector_{index}"])
    return rows


def store_rows(state: State, params: Sequence[Tensor], rows: Float[Tensor, "k n"]) -> None:
    """Let each parameter's state show its share of the rows, as k entries of the parameter's shape."""
    for param, share in zip(params, shares(rows, params), strict=True):
        for index, piece in enumerate(share):
            state[param][f"vector_{index}"] = piece.view(param.shape)


def forget_rows(state: State) -> None:
    """Drop every share of the sketch, that of parameters which have left it included."""
    for entries in state.values():
        for name in [name for name in entries if name.startswith("vector_")]:
            del entries[name]


def shares(rows: Float[Tensor, "k n"], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Cut the rows by parameter."""
    pieces: Sequence[Tensor] = rows.split([p.numel() for p in params], dim=1)
    return pieces

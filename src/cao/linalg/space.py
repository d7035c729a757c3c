"""The space that columns lie in: its inner products, lengths and random columns, wherever its rows are."""

from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Devices that have no float64."""


def precise(device: torch.device) -> torch.dtype:
    """Return the most precise type that a device can add up in."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def in_float64(small: Tensor) -> Tensor:
    """Return a few numbers in float64: where they are or, if that device has none, on the CPU."""
    return small.cpu().double() if small.device.type in WITHOUT_FLOAT64 else small.double()


class Space:
    """A space of columns, all of whose rows are in this process; those of another may be spread over several."""

    mesh: Any = None
    """The processes that rows are spread over, if they are."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of what each process has added up over its rows."""
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean of the numbers that each process has."""
        return numbers

    def length(self, norms: Tensor) -> Tensor:
        """Return the lengths of columns of which each process knows the norm of its part."""
        return norms

    def norms(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """Return the columns' lengths."""
        return self.length(columns.norm(dim=0))

    def scale(self, param: Tensor) -> float:
        """Return the factor of a parameter's entries in columns."""
        return 1.0

    def count(self, columns: Float[Tensor, "n k"]) -> int:
        """Return how many rows there are in all processes."""
        return columns.shape[0]

    def random(
        self, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n k"]:
        """Draw standard normal columns, each contiguous in memory, on the generator's device."""
        return torch.randn(columns, rows, generator=generator, device=generator.device, dtype=dtype).T

    def basis(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return an orthonormal basis by Householder's reflections, which bear any columns."""
        # Where there is no float64, there may be no QR either.
        basis: Tensor = torch.linalg.qr(columns.cpu() if columns.device.type in WITHOUT_FLOAT64 else columns).Q
        return basis.to(columns)


HERE = Space()
"""The space of one process."""


def generator_for(device: torch.device, *numbers: int) -> torch.Generator:
    """Return a random stream that depends on all the numbers, and on nothing else: no interpreter, no global stream."""
    # Four bytes, because torch's generator on a CPU looks at the lower 32 bits of a seed only.
    digest = sha256(repr(numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))

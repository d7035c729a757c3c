"""How many floats CAO holds: every tensor that is alive is counted."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cao import CAO


class AllocationMeter(TorchDispatchMode):
    """Within it, every tensor that is made is counted until its memory is freed.

    What a kernel needs for itself and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and take note of its results."""
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and not result._is_zerotensor():  # Forward mode has zeros without memory.
                self._note(result.untyped_storage())
        return results

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


class Diagonal:
    """A diagonal matrix: its product is one multiplication a number, so that all else is the eigensolver's."""

    def __init__(self, param: nn.Parameter) -> None:
        self.params = [param]
        self.diagonal = torch.linspace(-1, 2, param.numel(), device=param.device)
        self.products = 0

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the product with each column, contiguous in memory."""
        self.products += columns.shape[1]
        return (columns.T * self.diagonal).T


def floats_per_parameter(n: int, k: int) -> tuple[float, float]:
    """Return, in multiples of n, the floats held between refreshes and the most held during the second one."""
    with AllocationMeter() as meter:
        param = nn.Parameter(torch.zeros(n))
        operator = Diagonal(param)
        own = meter.live_bytes - 4 * n
        optimizer = CAO([param], 1e-3, rank=k, refresh_every=1, damping=0.1)
        for _ in range(2):
            meter.reset_peak()
            optimizer.refresh(operator)
            peak = meter.peak_bytes
            param.grad = torch.zeros_like(param)
            optimizer.step()
            optimizer.zero_grad()
        return (meter.live_bytes - own) / (4 * n), (peak - own) / (4 * n)

"""A simulated accelerator: tensors that claim another device, hold their data on the CPU, and refuse what it would.

The device is called `meta`, the only one besides the CPU for which autograd of a CPU build works.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cao.linalg import columns

DEVICE = torch.device("meta")
ATEN = torch.ops.aten
# Copies, and what takes indices from the host.
TAKES_BOTH = (ATEN._to_copy.default, ATEN.copy_.default, ATEN.index.Tensor, ATEN.index_put_.default)
# What a host has to wait for, besides a copy to it.
READS = (
    *(ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.nonzero.default, ATEN.masked_select.default),
    *(ATEN._linalg_eigh.default, ATEN._linalg_svd.default),
)


class OnDevice(Tensor):
    """A tensor that claims to be on the device."""

    held: Tensor
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor: OnDevice = Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=DEVICE)
        tensor.held = held
        return tensor

    def __getitem__(self, place: Any) -> Tensor:
        # Torch would make an index tensor on `meta`, without data, of a list.
        places = place if isinstance(place, tuple) else (place,)
        return super().__getitem__(tuple(torch.tensor(each) if isinstance(each, list) else each for each in places))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return made_there(torch.tensor)(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise RuntimeError("a tensor of the simulated device was used while that was off")


class AnyGenerator(torch.Generator):
    """A random stream of the processor, which may claim to be on the device."""

    def __new__(cls, device: torch.device | str = "cpu") -> "AnyGenerator":
        generator = super().__new__(cls)
        generator.claimed = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.claimed


class AnyAutocast(torch.autocast):
    """Autocast, which does not know the device."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *args, **kwargs)


class SimulatedDevice(TorchDispatchMode):
    """Runs what is asked of the device, and refuses to mix devices or to make float64 where it has none."""

    def __init__(self, *, has_float64: bool = True) -> None:
        super().__init__()
        self.has_float64 = has_float64
        self.reads: Counter[str] = Counter()
        """What the host has waited for."""
        self.operations: list[tuple[str, tuple[torch.Size, ...]]] = []
        """What the device was asked to do, and the shapes that came out."""

    def __enter__(self) -> "SimulatedDevice":
        self._stack = ExitStack()
        replaced = {"Generator": AnyGenerator, "autocast": AnyAutocast}
        replaced |= {name: made_there(getattr(torch, name)) for name in ("tensor", "as_tensor")}
        replaced["is_autocast_enabled"] = asked_here(torch.is_autocast_enabled)
        for name, value in replaced.items():
            self._stack.enter_context(patch.object(torch, name, value))
        if not self.has_float64:
            columns.WITHOUT_FLOAT64.add(DEVICE.type)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        columns.WITHOUT_FLOAT64.discard(DEVICE.type)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        claimed = kwargs.get("device")
        is_ours = claimed == DEVICE if claimed is not None else bool(ours)
        if func is ATEN.copy_.default:
            is_ours = isinstance(args[0], OnDevice)
        if not ours and not is_ours:
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors):
            raise RuntimeError(f"{func} was given a tensor of meta itself, which has no data")
        if func not in TAKES_BOTH and any(tensor.ndim and not isinstance(tensor, OnDevice) for tensor in tensors):
            raise RuntimeError(f"tensors of two devices meet in {func}")
        self._check(kwargs.get("dtype"), func)
        if func in READS or (ours and not is_ours):
            self.reads[str(func)] += 1
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():  # The shape of what claims to be there changes too.
                func(*args, **kwargs)
        if claimed is not None:
            kwargs["device"] = torch.device("cpu")
        # Zeros without memory are forward mode's: torch resolves them before they come to a device.
        run = ATEN.zeros.default if func is ATEN._efficientzerotensor.default else func
        result = run(*tree_map(held_by, args), **tree_map(held_by, kwargs))
        shapes = tuple(each.shape for each in tree_leaves(result) if isinstance(each, Tensor))
        self.operations.append((str(func), shapes))
        return tree_map(lambda each: self._wrapped(each, ours, func), result) if is_ours else result

    def _wrapped(self, result: Any, ours: list[OnDevice], func: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        self._check(result.dtype, func)
        changed = [tensor for tensor in ours if tensor.held is result]
        return changed[0] if changed else OnDevice(result)

    def _check(self, dtype: torch.dtype | None, func: Any) -> None:
        if dtype == torch.float64 and not self.has_float64:
            raise TypeError(f"the simulated device has no float64, which {func} asks for")


def made_there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes tensors of numbers, which torch would make on `meta` without data."""

    def on_device(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device) != DEVICE or isinstance(data, OnDevice):
            return make(data, device=device, **kwargs)
        return make(data, **kwargs).to(DEVICE)

    return on_device


def asked_here(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Return a question about autocast that knows the device, where there is none."""
    return lambda *device: False if device == (DEVICE.type,) else ask(*device)


def held_by(value: Any) -> Any:
    """Return what a tensor of the device holds, and anything else as it is."""
    return value.held if isinstance(value, OnDevice) else value


def moved(model: nn.Module) -> nn.Module:
    """Return the model with its parameters and buffers on the device."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(OnDevice(param.detach().clone()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer.clone())
    return model

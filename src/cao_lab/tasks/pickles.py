"""Read a pickle of numpy arrays, strings, lists and dicts, without running anything that it names."""

import mmap
import pickle
from pathlib import Path
from typing import Any, Self

import numpy as np

from cao_lab.tasks.pickle_bounds import check_bounds

NUMBERS = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"})


class DataError(ValueError):
    """A data file is missing, damaged, or not what its name promises."""


class _Latin1(bytes):
    """Stand-in for `_codecs.encode`, by which Python 3 writes bytes in the format of Python 2."""

    def __new__(cls, text: str, encoding: str) -> Self:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it encodes bytes as {encoding}, expected latin1")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes bytes in place")


class _Dtype:
    """Stand-in for `numpy.dtype` that knows plain numbers only."""

    def __init__(self, code: str | bytes, *options: object) -> None:
        self.code = _text(code)
        self.byte_order = "="
        if self.code not in NUMBERS:
            raise pickle.UnpicklingError(f"it holds an array of {self.code!r}, expected numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = _text(state[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.byte_order + self.code)


class _Array:
    """Stand-in for `numpy.ndarray` and for the function that creates an empty one to be filled."""

    def __init__(self, *arguments: object) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, kind, is_fortran, content = state
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if is_fortran else "C")


class _BufferArray(_Array):
    """Stand-in for the function that recreates an array in pickle protocol 5."""

    def __init__(self, content: bytes, kind: _Dtype, shape: tuple[int, ...], order: Any) -> None:
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order=order)


# numpy's own classes would not do: `dtype.__setstate__` trusts the flags in the file, so that the bytes of an
# object array become pointers. A stand-in has a `__setstate__` to keep a pickle from writing its attributes.
STAND_INS: dict[str, type] = {
    "_codecs.encode": _Latin1,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.numeric._frombuffer": _BufferArray,
    "numpy._core.numeric._frombuffer": _BufferArray,
}


class _DataUnpickler(pickle.Unpickler):
    """An unpickler whose every callable is a stand-in."""

    def find_class(self, module: str, name: str) -> type:
        full_name = f"{module}.{name}"
        if full_name not in STAND_INS:
            raise pickle.UnpicklingError(f"it names {full_name}, which data never needs; nothing was run")
        return STAND_INS[full_name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dict that a pickle of Python 2 or 3 holds, with its arrays, under keys of type str.

    The arrays are read-only views of the bytes that were read.
    """
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, expected a dict")
    return {_text(key): value.array if isinstance(value, _Array) else value for key, value in content.items()}


def _unpickled(path: Path) -> object:
    try:
        # Mapped into memory, a length that the file only claims to have costs nothing.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            check_bounds(content)
            content.seek(0)
            return _DataUnpickler(content, encoding="bytes").load()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except Exception as error:  # There is hardly an exception that a damaged pickle cannot raise.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)

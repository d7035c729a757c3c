"""Pickles are read as data: arrays come back whole, and nothing that a file names is ever run."""

import contextlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from cao_lab.tasks.pickles import STAND_INS, DataError, read_pickle


class Call:
    """Pickles as a call of the given function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.reduced


def written(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_brings_the_arrays_back(tmp_path: Path, protocol: int) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 12)
    columns = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    path = written(tmp_path / "batch", {"data": images, b"columns": columns, "labels": [1, 2]}, protocol)
    content = read_pickle(path)
    assert content["labels"] == [1, 2]
    np.testing.assert_array_equal(content["data"], images, strict=True)
    np.testing.assert_array_equal(content["columns"], columns)


def test_a_file_of_python_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I2\nI2\nt"
        b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nU\x04\x00\x80\xff\x07tb"
    )
    path.write_bytes(b"\x80\x02(U\x04data" + array + b"U\x06labels(I3\nI4\nld.")
    content = read_pickle(path)
    assert content["labels"] == [3, 4]
    assert content["data"].tolist() == [[0, 128], [255, 7]]


@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "system"), (eval, "builtins.eval"), (np.load, "numpy.load")]
)
def test_any_other_callable_is_refused_by_name_and_does_not_run(tmp_path: Path, function: object, name: str) -> None:
    trace = tmp_path / "trace"
    path = written(tmp_path / "batch", {"data": Call(function, f"touch {trace}")})
    with pytest.raises(DataError, match=rf"batch cannot be read: it names \w*\.?{name}"):
        read_pickle(path)
    assert not trace.exists()


@pytest.mark.parametrize("code", [b"O", b"V8", b"M8[s]", b"u1,u1"])
def test_arrays_of_anything_but_numbers_are_refused(tmp_path: Path, code: bytes) -> None:
    with pytest.raises(DataError, match="expected numbers"):
        read_pickle(written(tmp_path / "batch", {"data": Call(np.dtype, code)}))


def test_an_object_array_that_denies_its_objects_is_refused(tmp_path: Path) -> None:
    hidden = np.dtype("O", copy=True)
    hidden.__setstate__((3, "|", None, None, None, -1, -1, 0))
    assert not hidden.hasobject
    with pytest.raises(DataError, match="expected numbers"):
        read_pickle(written(tmp_path / "batch", {"data": hidden}))


@pytest.mark.parametrize("name", [b"numpy\nndarray", b"numpy\ndtype", b"_codecs\nencode"])
def test_a_pickle_cannot_write_attributes_of_a_stand_in(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"c" + name + b"\n(N(Vpoison\nI1\ndtb.")
    with pytest.raises(DataError):
        read_pickle(path)
    assert not any(hasattr(stand_in, "poison") for stand_in in STAND_INS.values())


def test_bytes_in_another_encoding_than_latin1_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"c_codecs\nencode\n(Vabc\nVidna\ntR.")
    with pytest.raises(DataError, match="idna"):
        read_pickle(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_reported_with_its_path(tmp_path: Path, share: float) -> None:
    path = written(tmp_path / "batch", {"labels": [1, 2], "data": np.zeros((5, 3072), np.uint8)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"batch cannot be read: .+"):
        read_pickle(path)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(pickle.dumps({"data": np.zeros((2, 12), np.uint8), "labels": [0, 1]}, protocol=2))
    generator = np.random.default_rng(0)
    path = tmp_path / "batch"
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.integers(len(whole))] = generator.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            assert isinstance(read_pickle(path), dict)


def test_a_missing_file_and_a_pickle_that_is_no_dict_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent is missing"):
        read_pickle(tmp_path / "absent")
    with pytest.raises(DataError, match="batch holds a list, expected a dict"):
        read_pickle(written(tmp_path / "batch", [1]))

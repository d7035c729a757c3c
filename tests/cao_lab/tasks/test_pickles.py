"""Pickles are read as data: arrays come back whole, and nothing that a file names is ever run."""

import contextlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cao_lab.tasks import pickles
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


def nested(depth: int) -> bytes:
    """Return the instructions for a tuple in a tuple in a tuple."""
    return b")" + b"\x85" * depth


BOMBS = {
    # Hashing a key recurses in C without a limit; so does freeing it.
    "deep tuples as a key": b"\x80\x02}" + nested(200_000) + b"K\x01s.",
    "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    # Each tuple holds the last one twice: hashing the 60th would take 2⁶⁰ steps.
    "doubling tuples as a key": b"\x80\x02})q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    + b"h<K\x01s.",
    # Outer lists first, so that each is small when the next one is put into it.
    "doubling lists": b"\x80\x02"
    + b"".join(b"]q%c" % n for n in range(60))
    + b"".join(b"h%c(h%ch%ce" % (n, n + 1, n + 1) for n in range(59))
    + b"h\x00.",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "a value doubled in place": b"\x80\x02]22aa.",
    "a long text encoded again and again": b"\x80\x02}(c_codecs\nencode\nq\x00X\x00\x00\x10\x00"
    + b"a" * 2**20
    + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    + b"".join(b"K%ch\x00h\x01h\x02\x86R" % (n % 256) for n in range(4000))
    + b"u.",
    "instructions without end": b"\x80\x02](" + b"N" * 1_100_000 + b"e.",
    "a length that the file does not have": b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"abc.",
    "a set": b"\x80\x04\x8f.",
    "nothing to take": b"\x80\x02\x86.",
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_pickle_that_would_build_too_much_is_refused_before_it_is_built(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles._DataUnpickler, "load", lambda _: pytest.fail("it was built"))
    path = tmp_path / "bomb"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bomb cannot be read: .+"):
        read_pickle(path)


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_of_the_size_of_cifar_s_labels_is_within_bounds(tmp_path: Path, protocol: int) -> None:
    names = [f"image_{number:06d}.png" for number in range(50_000)]
    content = {"filenames": names, "fine_labels": [n % 100 for n in range(50_000)], "data": np.zeros(10, np.uint8)}
    assert len(read_pickle(written(tmp_path / "train", content, protocol))["filenames"]) == 50_000


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("arbitrary") / "batch"
    path.write_bytes(b"\x80\x02" + content)
    with contextlib.suppress(DataError):
        assert isinstance(read_pickle(path), dict)


PARTS = st.sampled_from(
    [b"}", b"]", b")", b"(", b"K\x01", b"N", b"s", b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"q\x00", b"q\x01",
     b"h\x00", b"h\x01", b"U\x01a", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"R", b"b", b"2"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=40))
def test_arbitrary_instructions_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("instructions") / "batch"
    path.write_bytes(b"\x80\x02" + b"".join(parts) + b".")
    with contextlib.suppress(DataError):
        assert isinstance(read_pickle(path), dict)

"""Every reader gives a value or one line, whatever lies where a log should be."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_logs import EPOCH_HEADER, REFRESH_HEADER, Run, epoch_lines, header, refresh_lines

from cao_lab.log.header import OtherKindError, read_header, read_run, read_solve, read_sweep, run_record
from cao_lab.log.reading import read_rows
from cao_lab.log.records import EpochRecord, LogError, RefreshRecord
from cao_lab.log.writing import RowFile

RUN = Run([3.0, 2.0, 1.0], eigenvalues=[4.0, 2.0])
EPOCHS = "\n".join([EPOCH_HEADER, *epoch_lines(RUN), ""])
REFRESHES = "\n".join([REFRESH_HEADER, *refresh_lines(RUN), ""])
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "run.json": (lambda path: read_run(path.parent), json.dumps(header(RUN))),
    "epochs.csv": (lambda path: read_rows(path, EpochRecord), EPOCHS),
    "refreshes.csv": (lambda path: read_rows(path, RefreshRecord), REFRESHES),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def refusal(name: str, content: bytes) -> str | None:
    """Return the line in which a reader refuses a file, None if it reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            READERS[name][0](path)
        except LogError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", READERS)
def test_what_training_writes_is_read(name: str) -> None:
    assert refusal(name, READERS[name][1].encode()) is None


@pytest.mark.parametrize("name", READERS)
@settings(deadline=None, max_examples=60)
@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_at_all_is_read_or_refused_in_one_line(name: str, content: bytes) -> None:
    assert "\n" not in (refusal(name, content) or "")


@pytest.mark.parametrize("name", READERS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    content = READERS[name][1].encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(start + 20, len(content))))
    damage = data.draw(st.binary(max_size=5) | st.sampled_from([b"\r", b"\n", b",", b'"', b"\x00", b"9" * 5000]))
    assert "\n" not in (refusal(name, content[:start] + damage + content[end:]) or "")


@pytest.mark.parametrize("key", [*header(RUN), "config.optimizer", "config.epochs", "config.curvature"])
@settings(deadline=None, max_examples=30)
@given(JSON)
def test_any_value_of_run_json_is_taken_or_refused_in_one_line(key: str, value: Any) -> None:
    found = json.loads(json.dumps(header(RUN)))
    owner = found["config"] if key.startswith("config.") else found
    owner[key.removeprefix("config.")] = value
    assert "\n" not in (refusal("run.json", json.dumps(found).encode()) or "")


@pytest.mark.parametrize("field", ["name", "lr", "momentum", "rank", "damping", "refresh_every", "scaling", "sketch"])
@pytest.mark.parametrize("value", [[], {}, math.nan, 10**400, "\ud800", True])
def test_a_setting_that_no_optimizer_has_is_refused_by_name(field: str, value: object) -> None:
    found = header(RUN)
    found["config"]["optimizer"] = found["config"]["optimizer"] | {field: value}
    with pytest.raises(LogError, match=rf"config\.optimizer\.{field} must be"):
        run_record(found)


@pytest.mark.parametrize("key", ["suite", "task", "label"])
@pytest.mark.parametrize("value", ["", ".", "../../x", "/etc", "a\nb", "\ud800", "x" * 256, 5, [], None])
def test_a_name_that_no_folder_can_have_is_refused(key: str, value: object) -> None:
    with pytest.raises(LogError, match=f"{key} must be"):
        run_record(header(RUN) | {key: value})


def test_a_suite_may_be_a_folder_in_a_folder() -> None:
    assert run_record(header(RUN) | {"suite": "mine/first"}).suite == "mine/first"


def directory(path: Path) -> None:
    path.mkdir()


def circle(path: Path) -> None:
    path.symlink_to(path)


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("put", [directory, circle, link_to_nowhere, pipe])
def test_what_is_not_a_file_is_refused(name: str, put: Callable[[Path], None], tmp_path: Path) -> None:
    put(tmp_path / name)
    with pytest.raises(LogError, match=f"{name} cannot be read \\(it is not a file\\)"):
        READERS[name][0](tmp_path / name)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused(opening: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(opening * 100_000)
    for read in (read_run, read_header):
        with pytest.raises(LogError, match="nested too deeply"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("train_loss", "trainXloss", "its first line lacks train_loss"),
        ("step", "epoch", "its first line lacks epoch, step"),
        (",500.0,", ",500\r.0,", "line 2 is damaged"),
        (",500.0,", ",", "line 2 is damaged"),
        (",500.0,", ",5_0,", "line 2 is damaged"),
        (",500.0,", ",inf,", "line 2 is damaged: a number must be a finite number, got inf"),
        ("\n2,80", "\n2.5,80", "line 3 is damaged: a count must be a whole number"),
        ("process", "x" * 140_000, "line 2 is damaged: the source of memory must be cuda or process"),
        ("process", "memory", "line 2 is damaged: the source of memory must be cuda or process"),
    ],
)
def test_a_damaged_row_is_refused_by_its_line(old: str, new: str, reason: str) -> None:
    assert old in EPOCHS
    assert reason in (refusal("epochs.csv", EPOCHS.replace(old, new, 1).encode()) or "")


def test_rows_with_the_line_ends_of_windows_are_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "unix.csv").write_bytes(EPOCHS.encode())
    (tmp_path / "windows.csv").write_bytes(EPOCHS.replace("\n", "\r\n").encode())
    unix, windows = (read_rows(tmp_path / f"{name}.csv", EpochRecord) for name in ("unix", "windows"))
    assert unix == windows
    assert [row.train_loss for row in windows.records] == [3.0, 2.0, 1.0]


def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    (tmp_path / "epochs.csv").write_text(EPOCHS[:-5])
    found = read_rows(tmp_path / "epochs.csv", EpochRecord)
    assert found.is_torn
    assert [row.epoch for row in found.records] == [1, 2]


def test_a_file_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "epochs.csv").open("wb") as file:
        file.truncate(2**29)
    with pytest.raises(LogError, match="larger than 256 MiB"):
        read_rows(tmp_path / "epochs.csv", EpochRecord)


@dataclass(frozen=True)
class NewerRecord(EpochRecord):
    """What a row may become."""

    energy: float | None = None


def test_a_log_from_before_a_column_was_added_is_read_and_goes_on_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text(EPOCHS)
    rows = read_rows(path, NewerRecord).records
    assert [row.train_loss for row in rows] == [3.0, 2.0, 1.0]
    assert [row.energy for row in rows] == [None] * 3
    file = RowFile(path, NewerRecord)
    file.cut_back(2)
    file.append([replace(rows[2], energy=5.0)])
    assert path.read_text() == EPOCHS


def test_a_column_with_a_default_is_written_and_read_in_new_logs(tmp_path: Path) -> None:
    row = NewerRecord(**asdict(read_old()), energy=5.0)
    RowFile(tmp_path / "epochs.csv", NewerRecord).append([row])
    assert read_rows(tmp_path / "epochs.csv", NewerRecord).records == [row]


def read_old() -> EpochRecord:
    """The first row of a log that lacks the column."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epochs.csv").write_text(EPOCHS)
        return read_rows(Path(folder, "epochs.csv"), EpochRecord).records[0]


LOGS = Path(__file__).parents[3] / "logs"
OLDER = {
    "run.json": (read_run, "mini/cifar10-resnet18w8-n5000/adam/seed0"),
    "solve.json": (read_solve, "scientific/wave-3x20/adam/seed1"),
    "sweep.json": (read_sweep, "robust/mlp/seed1"),
}


@pytest.mark.parametrize("name", OLDER)
def test_the_shipped_logs_of_format_1_are_read_as_those_of_today(name):
    read, place = OLDER[name]
    assert (LOGS / place / name).exists()
    found = read(LOGS / place)
    assert (found.status, found.suite, found.task) == ("finished", *place.split("/")[:2])
    assert found.seed == int(place[-1])
    for other in {read_run, read_solve, read_sweep} - {read}:
        with pytest.raises(OtherKindError, match="is of a run of kind"):
            other(LOGS / place)

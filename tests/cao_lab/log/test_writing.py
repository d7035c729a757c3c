import csv
import math
import multiprocessing

import pytest

from cao_lab.log.records import EpochRecord, LogError, RefreshRecord
from cao_lab.log.writing import RunLog


def record(epoch, loss=0.5):
    return EpochRecord(epoch, 10 * epoch, loss, 0.9, 0.6, None, 0.1, 1.25, 100.0, "process", 10 * epoch, 0, 0)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_under_one_header(tmp_path):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1)])
        log.epochs.append([record(2, loss=math.nan)])
    rows = read(tmp_path / "epochs.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert rows[1]["train_loss"] == "nan"
    assert rows[0]["test_accuracy"] == ""


def test_floats_are_written_to_the_last_bit(tmp_path):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1, loss=0.1 + 0.2)])
    assert float(read(tmp_path / "epochs.csv")[0]["train_loss"]) == 0.1 + 0.2


def test_cutting_back_drops_later_rows_and_a_torn_one(tmp_path):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1), record(2), record(3)])
        with log.epochs.path.open("a") as file:
            file.write("4,40,0.")
        log.cut_back(epochs=2, refreshes=0)
        log.epochs.append([record(3)])
    assert [row["epoch"] for row in read(tmp_path / "epochs.csv")] == ["1", "2", "3"]


def test_cutting_back_to_the_start_leaves_an_empty_file(tmp_path):
    with RunLog(tmp_path) as log:
        log.refreshes.append([RefreshRecord(0, 0.0, 1, 2.5, 0.1, True, 0.1, 11)])
        log.cut_back(epochs=0, refreshes=0)
    assert (tmp_path / "refreshes.csv").read_text() == ""


def test_a_log_that_lost_rows_is_refused(tmp_path):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1)])
        with pytest.raises(LogError, match="fewer than the 2 rows"):
            log.cut_back(epochs=2, refreshes=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(b"train_loss", b"train_lass"), "does not begin with the names of its columns"),
        (lambda text: text[text.index(b"\n") + 1 :] + b"4,40,0.5", "fewer than|does not begin"),
        (lambda text: text.replace(b"process", b"pro\rcess", 1), "line 2 is damaged"),
        (lambda text: text.replace(b"\n", b"\r\n"), "does not begin with the names"),
        (lambda text: text.replace(b",0.9,", b",", 1), "line 2 is damaged"),
        (lambda text: text[:-20], "fewer than the 3 rows"),
        (lambda text: b"", "fewer than the 3 rows"),
    ],
)
def test_a_damaged_log_is_refused_untouched_and_the_message_says_what_to_do(tmp_path, damage, message):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1), record(2), record(3)])
        damaged = damage(log.epochs.path.read_bytes())
        log.epochs.path.write_bytes(damaged)
        with pytest.raises(LogError, match=message) as caught:
            log.cut_back(epochs=3, refreshes=0)
        assert "put a copy of it back, or remove" in str(caught.value)
        assert log.epochs.path.read_bytes() == damaged


def test_header_is_replaced_as_a_whole(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_header({"kind": "training", "status": "running", "seed": 1})
        log.update_header(status="finished")
        assert log.header == {"kind": "training", "status": "finished", "seed": 1}
    assert not (tmp_path / "run.json.new").exists()


def test_unreadable_header_says_what_to_do(tmp_path):
    (tmp_path / "run.json").write_text('{"status": ')
    with RunLog(tmp_path) as log, pytest.raises(LogError, match=r"move .* away to start afresh"):
        _ = log.header


def take_lock(folder):
    with RunLog(folder):
        pass


def test_second_process_is_refused_while_the_first_is_at_work(tmp_path):
    with (
        RunLog(tmp_path),
        multiprocessing.get_context("fork").Pool(1) as pool,
        pytest.raises(LogError, match="another"),
    ):
        pool.apply(take_lock, [tmp_path])
    take_lock(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [(b"train_loss", b"trainXloss"), (b"1.25", b"1\r25"), (b"1.25", b"1.2\x00"), (b"process", b"proc")]
)
def test_a_damaged_log_is_refused_and_left_as_it_is(tmp_path, old, new):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1), record(2), record(3)])
        damaged = log.epochs.path.read_bytes().replace(old, new, 1)
        log.epochs.path.write_bytes(damaged)
        with pytest.raises(LogError, match=r"epochs.csv (cannot be read \(.*\)|does not begin)") as error:
            log.cut_back(epochs=2, refreshes=0)
        assert "\n" not in str(error.value)
        assert log.epochs.path.read_bytes() == damaged


def test_what_comes_after_the_checkpoint_may_be_damaged(tmp_path):
    with RunLog(tmp_path) as log:
        log.epochs.append([record(1), record(2)])
        with log.epochs.path.open("ab") as file:
            file.write(b"3,30\r\x00\n\n4,")
        log.cut_back(epochs=2, refreshes=0)
    assert [row["epoch"] for row in read(tmp_path / "epochs.csv")] == ["1", "2"]

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace

import pytest

from cao_lab.log import locking
from cao_lab.log.locking import Lock, Owner, look
from cao_lab.log.records import LogError

CONTENDERS = 8
ELSEWHERE = replace(Owner.this_process(), machine="another boot container", token="theirs")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locking, "PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(locking, "LOOK_SECONDS", 0.02)


def leave(folder, owner):
    (folder / "run.lock").write_text(json.dumps(asdict(owner)))


def hold_until_killed(folder, has_lock):
    with Lock(folder):
        has_lock.set()
        time.sleep(60)


def test_a_lock_excludes_others_names_its_owner_and_leaves_nothing_behind(tmp_path):
    with Lock(tmp_path) as lock:
        with pytest.raises(LogError, match=rf"another .* \(process {os.getpid()} on "), Lock(tmp_path):
            pass
        lock.check()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_of_this_machine_is_free_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    has_lock = context.Event()
    process = context.Process(target=hold_until_killed, args=(tmp_path, has_lock))
    process.start()
    has_lock.wait()
    with pytest.raises(LogError, match="another process is working on"), Lock(tmp_path):
        pass
    # Not joined yet, the process is a zombie, as it is while torchrun has not looked at it.
    os.kill(process.pid, signal.SIGKILL)
    while locking.start_of(process.pid):
        time.sleep(0.01)
    began = time.monotonic()
    with Lock(tmp_path):
        assert time.monotonic() - began < locking.PATIENCE_SECONDS
    process.join()


def test_a_number_that_belongs_to_another_process_by_now_is_no_owner(tmp_path):
    leave(tmp_path, replace(Owner.this_process(), started="0"))
    with Lock(tmp_path):
        pass


def test_a_lock_of_another_machine_that_is_touched_is_respected(tmp_path):
    with Lock(tmp_path) as lock:
        # Written into the same file, which its owner goes on touching.
        leave(tmp_path, replace(lock.owner, machine="another boot container"))
        with pytest.raises(LogError, match=r"another process is working on .* on another"), Lock(tmp_path):
            pass


def test_a_silent_lock_of_another_machine_is_taken_over_after_the_wait(tmp_path):
    leave(tmp_path, ELSEWHERE)
    began = time.monotonic()
    with Lock(tmp_path):
        assert time.monotonic() - began >= locking.PATIENCE_SECONDS


def test_an_owner_that_was_silent_and_lost_its_lock_may_write_no_more_and_removes_nothing(tmp_path):
    with Lock(tmp_path) as lock:
        leave(tmp_path, ELSEWHERE)
        with pytest.raises(LogError, match="was taken over by another process"):
            lock.check()
    assert look(tmp_path / "run.lock")[0] == ELSEWHERE


def test_a_lock_that_changed_hands_between_look_and_removal_stays(tmp_path):
    leave(tmp_path, ELSEWHERE)
    Lock(tmp_path)._remove(tmp_path / "run.lock", replace(ELSEWHERE, token="an older one"))
    assert look(tmp_path / "run.lock")[0] == ELSEWHERE
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_the_empty_file_that_an_older_version_left_is_no_lock(tmp_path):
    (tmp_path / "run.lock").touch()
    with Lock(tmp_path):
        pass


def contend(folder, start, results):
    start.wait()
    try:
        with Lock(folder):
            (folder / f"held by {os.getpid()}").touch()
            time.sleep(0.3)
            results.put(len(list(folder.glob("held by *"))))
    except LogError:
        results.put(0)


@pytest.mark.parametrize("left_behind", [None, replace(Owner.this_process(), started="0")], ids=["free", "stale"])
def test_of_many_that_ask_at_once_one_gets_the_lock(tmp_path, left_behind):
    if left_behind is not None:
        leave(tmp_path, left_behind)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=contend, args=(tmp_path, start, results)) for _ in range(CONTENDERS)]
    for process in processes:
        process.start()
    start.set()
    assert sorted(results.get(timeout=30) for _ in processes) == [0] * (CONTENDERS - 1) + [1]
    for process in processes:
        process.join()


def test_a_process_that_died_while_it_removed_a_dead_ones_lock_stops_nobody(tmp_path):
    first, second = (replace(Owner.this_process(), started="0") for _ in range(2))
    leave(tmp_path, second)
    (tmp_path / "run.lock").rename(tmp_path / f"run.{first.token}.gone.lock")
    leave(tmp_path, first)
    with Lock(tmp_path) as lock:
        assert lock.is_held
    assert list(tmp_path.iterdir()) == []

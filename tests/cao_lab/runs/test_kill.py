"""A real process is killed at random instants, and the log must not show it."""

import csv
import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from cao_lab.config import Execution, RunConfig
from cao_lab.log.header import read_header
from cao_lab.runs import checkpoint
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig
from cao_lab.suites.launch import carried_out, to_bytes
from cao_lab.suites.runner import TrainingRun

KILLS = 20
MEASURED = {"train_seconds", "peak_memory_mib"}

# The server has imported torch, and what torch's optimizers import late, so that its children start in no time.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cao_lab.runs.session", "torch._dynamo"])

CONFIGS = [
    RunConfig(
        CAOConfig(refresh_every=40, warm_start=True, power_iterations=3), epochs=10, batch_size=16, monitor_curvature=2
    ),
    RunConfig(AdamConfig(), epochs=10, batch_size=16, schedule="cosine"),
]


def start(config, logs):
    execution = Execution(logs=logs, threads=1, checkpoint_minutes=0.05 / 60)
    process = CONTEXT.Process(target=carried_out, args=(to_bytes(TrainingRun(config), execution),))
    process.start()
    return process


def rows(folder: Path, file: str):
    if not (folder / file).exists():
        return []
    with (folder / file).open(newline="") as opened:
        table = list(csv.DictReader(opened))
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in table]


def finish(config, logs):
    process = start(config, logs)
    process.join()
    assert process.exitcode == 0
    return logs / config.folder


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return [finish(config, tmp_path_factory.mktemp("uninterrupted")) for config in CONFIGS]


def assert_same_log(folder, reference):
    assert read_header(folder)["status"] == "finished"
    assert rows(folder, "epochs.csv") == rows(reference, "epochs.csv")
    assert rows(folder, "refreshes.csv") == rows(reference, "refreshes.csv")


def kill_again_and_again(config, logs, draw, kills):
    """Kill and restart until the run is finished or the kills are used up; return how many were made."""
    made = 0
    while made < kills:
        process = start(config, logs)
        time.sleep(draw.uniform(0.0, 0.8))
        if process.exitcode is None:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        made += 1
    return made


@pytest.mark.slow
def test_a_run_killed_at_20_random_instants_leaves_the_log_of_an_uninterrupted_one(tmp_path, references):
    draw = random.Random(0)
    left = KILLS
    for attempt in itertools.count():
        which = attempt % len(CONFIGS)
        logs = tmp_path / str(attempt)
        left -= kill_again_and_again(CONFIGS[which], logs, draw, min(left, KILLS // 2))
        assert_same_log(finish(CONFIGS[which], logs), references[which])
        if left == 0:
            break


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_after_the_step_with_a_checkpoint_and_the_run_goes_on(tmp_path, references, number, code):
    config = CONFIGS[0]
    folder = tmp_path / config.folder
    process = start(config, tmp_path)
    while not (folder / "refreshes.csv").exists():
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    assert read_header(folder)["status"] == "interrupted"
    assert checkpoint.current(folder).exists()
    assert_same_log(finish(config, tmp_path), references[0])

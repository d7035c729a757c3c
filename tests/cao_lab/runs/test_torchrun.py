"""torchrun itself starts the processes, and starts them again when one is killed."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest
from rank_processes import run_ranks

from cao_lab.config import RunConfig, command_line
from cao_lab.log.header import read_header
from cao_lab.runs import checkpoint
from cao_lab.runs.methods.cao import CAOConfig

CONFIG = RunConfig(CAOConfig(refresh_every=12), epochs=30, width=8)


def torchrun(logs):
    """Start two processes of the command `cao`, which need not be installed."""
    code = "import sys; from cao_lab.cli import main; main(sys.argv[1:])"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 --no-python --"
    cao = f"{command_line(CONFIG).removeprefix('cao ')} --threads 1 --checkpoint-minutes 0.0001 --logs {logs}"
    command = [sys.executable, *torchrun.split(), sys.executable, "-c", code, *cao.split()]
    with open(f"{logs}.errors", "w") as errors:
        return subprocess.Popen(command, stderr=errors)


def losses(folder):
    with (folder / "epochs.csv").open(newline="") as file:
        return [(row["train_loss"], row["test_loss"]) for row in csv.DictReader(file)]


def workers(agent):
    """Return the processes that torchrun has started."""
    with open(f"/proc/{agent.pid}/task/{agent.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.slow
def test_torchrun_starts_a_killed_process_again_and_the_log_does_not_show_it(tmp_path):
    agent = torchrun(tmp_path / "killed")
    folder = tmp_path / "killed" / CONFIG.folder
    while not checkpoint.current(folder).exists():
        assert agent.poll() is None
        time.sleep(0.01)
    os.kill(workers(agent)[-1], signal.SIGKILL)
    assert run_ranks([CONFIG], tmp_path / "uninterrupted", 2) == [0, 0]
    assert agent.wait() == 0, (tmp_path / "killed.errors").read_text()
    header = read_header(folder)
    assert (header["status"], header["ranks"], len(header["resumed"])) == ("finished", 2, 1)
    assert len(losses(folder)) == CONFIG.epochs
    assert losses(folder) == losses(tmp_path / "uninterrupted" / CONFIG.folder)

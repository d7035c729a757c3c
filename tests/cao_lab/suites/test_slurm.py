import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cao_lab.config import ConfigError, Execution, SlurmOptions
from cao_lab.log.header import read_header
from cao_lab.runs.stopping import StopRequest
from cao_lab.suites import find_suite
from cao_lab.suites import slurm as slurm_module
from cao_lab.suites.estimate import list_runs
from cao_lab.suites.runner import SuiteRunner, TrainingRun, run_suite
from cao_lab.suites.slurm import Slurm, jobs_in_queue

SUITE = """
from cao_lab.config import RunConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.runs.methods.cao import CAOConfig
MIXED = [RunConfig(SGDConfig(), epochs=1, width=8), RunConfig(AdamConfig(), epochs=1, train_samples=10**6)]
TWO = [RunConfig(SGDConfig(), epochs=1, width=8, seed=seed) for seed in range(2)]
LONG = [RunConfig(CAOConfig(refresh_every=12), epochs=60, width=8)]
"""
OPTIONS = SlurmOptions(partition="main", minutes=30, cpus=2, gpus=1, memory_gib=4)


@pytest.fixture
def suite_file(tmp_path):
    path = tmp_path / "suites.py"
    path.write_text(SUITE)
    return path


def runner_of(tmp_path):
    launcher = Slurm(SlurmOptions(partition="main"), 2, tmp_path / ".slurm", cluster="local")
    return SuiteRunner(Execution(logs=tmp_path / "logs", threads=1), 2, StopRequest(), launcher)


def test_submitits_own_executor_carries_a_round_out_and_tells_why_a_run_failed(suite_file, tmp_path, capsys):
    configs = find_suite(f"{suite_file}:MIXED")[1]
    runner = runner_of(tmp_path)
    assert [run.status for run in runner.run_round(configs)] == ["finished", "failed"]
    assert list(runner.failures) == [configs[1].folder]
    assert "TaskError: train_samples must be from 10 to 1437, got 1000000" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_is_requeued_and_goes_on(suite_file, tmp_path):
    config = find_suite(f"{suite_file}:LONG")[1][0]
    folder = tmp_path / "logs" / config.folder
    runner = runner_of(tmp_path)
    (run,) = runner.launcher.start([TrainingRun(config)], runner.execution)
    while not (folder / "epochs.csv").exists():
        time.sleep(0.01)
    # submitit's task, whose parent is the process that plays the part of Slurm.
    (task,) = psutil.Process(int(run.job.job_id)).children()
    task.send_signal(signal.SIGUSR2)
    run.wait()
    header = read_header(folder)
    assert header["status"] == "finished"
    assert len(header["resumed"]) == 1
    assert (folder / "epochs.csv").read_text().count("\n") == 61


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Put a Slurm on the path whose sbatch keeps what it is given and whose squeue reads a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "queue").touch()
    scripts = {
        "sbatch": f'cat "$1" >> {tmp_path}/submitted; echo Submitted batch job 7',
        "squeue": f"cat {tmp_path}/queue",
        "srun": "exit 1",
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_a_round_is_one_array_with_the_flags_that_a_dry_run_prints(suite_file, fake_slurm):
    *_, described = list_runs(f"{suite_file}:TWO", Execution(logs=fake_slurm, threads=1), 2, OPTIONS)
    assert not (fake_slurm / "submitted").exists()
    Slurm(OPTIONS, 2, fake_slurm / "folder").start(find_suite(f"{suite_file}:TWO")[1], Execution())
    submitted = re.findall(r"#SBATCH (\S+)", (fake_slurm / "submitted").read_text())
    flags = described.removeprefix("sbatch ").split()
    assert {"--partition=main", "--time=30", "--cpus-per-task=2", "--array=0-1%2", "--mem=4GB"} <= set(flags)
    assert set(flags) <= set(submitted)


def test_a_second_command_finds_the_jobs_of_the_first_in_the_queue(suite_file, fake_slurm):
    configs = find_suite(f"{suite_file}:MIXED")[1]
    Slurm(OPTIONS, 2, fake_slurm / "folder").start(configs, Execution())
    (fake_slurm / "queue").write_text("7_1\n")
    (fake_slurm / "submitted").unlink()
    runs = Slurm(OPTIONS, 2, fake_slurm / "folder").start(configs, Execution())
    assert "--array" not in (fake_slurm / "submitted").read_text()  # One run was missing, and is a job by itself.
    assert [run.job.job_id for run in runs] == ["7", "7_1"]


def test_a_job_that_left_the_queue_without_a_result_has_ended(suite_file, fake_slurm, monkeypatch):
    monkeypatch.setattr(slurm_module, "QUEUE_SECONDS", 0.0)
    (run, other) = Slurm(OPTIONS, 2, fake_slurm / "folder").start(find_suite(f"{suite_file}:MIXED")[1], Execution())
    (fake_slurm / "queue").write_text("7_0\n")
    assert not run.has_ended
    assert other.has_ended
    assert other.reason == "job 7_1 left no message"


def test_a_queue_that_does_not_answer_is_no_end(fake_slurm):
    (fake_slurm / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")
    assert jobs_in_queue() is None
    assert Slurm(OPTIONS, 2, fake_slurm / "folder").is_queued("7_0")


def test_what_is_missing_is_said_in_one_line(suite_file, tmp_path, monkeypatch):
    def refused(match, jobs=1, options=OPTIONS):
        with pytest.raises(ConfigError, match=match):
            run_suite(f"{suite_file}:MIXED", Execution(logs=tmp_path), jobs, options)

    monkeypatch.setattr(shutil, "which", lambda _: None)
    refused("no sbatch is found here; give the command on a machine of the cluster")
    refused("--launcher slurm needs --partition NAME, got none", options=SlurmOptions())
    refused("jobs must be at least 1, got 0", jobs=0)
    monkeypatch.setitem(sys.modules, "submitit", None)
    refused(r"needs the extra `slurm`: pip install 'cao-optimizer\[slurm\]'")
    with pytest.raises(ConfigError, match="minutes must be at least 3, got 0"):
        SlurmOptions(minutes=0)


HAS_SLURM = shutil.which("sbatch") and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SLURM, reason="Slurm is not installed here, or not running")
def test_a_real_slurm_carries_a_suite_out(suite_file, tmp_path, capfd):
    partition = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    options = SlurmOptions(partition=partition, minutes=10)
    assert run_suite(f"{suite_file}:MIXED", Execution(logs=tmp_path / "logs"), 2, options) == 1
    said = capfd.readouterr().out
    assert "finished MIXED/digits-mlpw8/sgd/seed0" in said
    assert "train_samples must be from 10 to 1437, got 1000000" in said

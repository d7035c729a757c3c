"""Runs side by side on the GPUs of a machine, and the command that carries out the whole paper."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cao_lab.config import Execution, RunConfig
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.session import run
from cao_lab.suites import launch
from cao_lab.suites.estimate import product_prices
from cao_lab.suites.launch import LocalProcesses, gpus
from cao_lab.suites.runner import TrainingRun

ROOT = Path(__file__).parents[3]
WORKS = [TrainingRun(RunConfig(SGDConfig(), seed=seed)) for seed in range(5)]


class Process:
    """Stands for a process: the GPU that it was told, and whether it has ended."""

    def __init__(self, _message, _errors, _threads, gpu):
        self.gpu, self.code, self.returncode = gpu, None, 0

    def poll(self):
        return self.code


@pytest.fixture
def processes(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "start_process", lambda *told: started.append(Process(*told)) or started[-1])
    return started


def test_runs_spread_over_the_gpus_and_take_the_place_of_those_that_ended(processes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    launcher = LocalProcesses(3)
    launcher.start(WORKS[:3], Execution())
    assert [one.gpu for one in processes] == ["0", "1", "2"]
    processes[1].code = 0
    launcher.start(WORKS[3:4], Execution())
    assert processes[3].gpu == "1"
    launcher.start(WORKS[4:], Execution())
    assert processes[4].gpu == "0"


@pytest.mark.parametrize(("visible", "device"), [("", "auto"), ("0,1", "cpu")])
def test_without_a_gpu_to_use_none_is_named(processes, visible, device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    LocalProcesses(2).start(WORKS[:2], Execution(device=device))
    assert [one.gpu for one in processes] == [None, None]


def test_only_the_gpus_that_the_environment_allows_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert gpus() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpus() == ["0", "1"]


def test_a_process_sees_its_own_gpu_alone(monkeypatch):
    code = "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] != '4')"
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **told: started([sys.executable, "-c", code], **told))
    assert launch.start_process(b"", None, 1, "4").wait() == 0


def test_a_run_says_in_which_arithmetic_a_gpu_computes(tmp_path):
    torch.backends.cudnn.allow_tf32 = True
    config = RunConfig(CAOConfig(rank=0), epochs=1)
    run(config, Execution(logs=tmp_path, threads=1))
    header = json.loads((tmp_path / config.folder / "run.json").read_text())
    assert header["arithmetic"] == {
        "tf32_matmul": False, "tf32_cudnn": False, "cudnn_benchmark": False, "cudnn_deterministic": True,
        "deterministic_algorithms": False,
    }  # fmt: skip


def test_a_product_is_priced_as_the_bench_has_measured_it(tmp_path):
    assert product_prices(tmp_path) == {"hessian": 3.2, "gauss-newton": 2.1}
    rows = [{"name": "hessian_product_per_gradient", "value": 5.5}, {"name": "other", "value": None}]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    assert product_prices(tmp_path) == {"hessian": 5.5, "gauss-newton": 2.1}
    (tmp_path / "bench.json").write_text("torn")
    assert product_prices(tmp_path)["hessian"] == 3.2


def test_make_paper_gets_the_data_runs_both_suites_and_reports():
    def commands(*arguments):
        told = subprocess.run(
            ["make", "-n", "--no-print-directory", "paper", "BIN=/x", "DATA=here", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.splitlines()

    data, _, suites, report = commands()
    assert "cifar10 cifar100; do /x/cao data $name --data-dir here" in data
    assert "paper sensitivity; do /x/cao suite $suite --jobs $jobs --data-dir here" in suites
    assert report == "/x/cao report logs --out report"
    (priced,) = commands("DRY_RUN=1")
    assert "--dry-run --data-dir here" in priced

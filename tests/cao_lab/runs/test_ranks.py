"""Several processes carry out one run; the oracle is one process, on the joined batch."""

import csv
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from rank_processes import complaint, ends, run_ranks, start_ranks
from torch.nn.functional import cross_entropy

from cao_lab.config import ConfigError, Execution, RunConfig
from cao_lab.log.header import read_header
from cao_lab.log.writing import RunLog
from cao_lab.runs import checkpoint
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdaHessianConfig, SGDConfig
from cao_lab.runs.methods.lbfgs import LBFGSConfig
from cao_lab.runs.ranks import backend_for, check_config
from cao_lab.runs.session import run
from cao_lab.tasks.data import batches, load
from cao_lab.tasks.problems import build_model

MEASURED = {"train_seconds", "peak_memory_mib"}

# The last of the batches has one sample: all processes but one come away empty.
SMALL = RunConfig(SGDConfig(), epochs=2, width=8, train_samples=97, batch_size=32, precision="fp64")
CAO = CAOConfig(rank=2, refresh_every=3, power_iterations=3)
ALIKE = {
    "sgd": SMALL,
    "cao": replace(SMALL, optimizer=CAO, l2=0.01, monitor_curvature=3),
    "gauss-newton": replace(SMALL, optimizer=CAO, curvature="gauss-newton", l2=0.02),
    "samples": replace(SMALL, optimizer=CAO, curvature_samples=16, curvature_part=8),
    "lbfgs": replace(SMALL, optimizer=LBFGSConfig(max_iterations=4), batch_size=None),
}
LONG = RunConfig(CAO, epochs=12, train_samples=256, batch_size=32, monitor_curvature=3)


def rows(folder, file="epochs.csv"):
    with (folder / file).open(newline="") as opened:
        table = list(csv.DictReader(opened))
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in table]


def numbers(folder, file):
    words = ("", "process", "True", "False")
    return [[float(cell) for cell in row.values() if cell not in words] for row in rows(folder, file)]


def final_weights(folder):
    return checkpoint.read(checkpoint.current(folder))["training"]["model"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The same runs, carried out by one, two and four processes."""
    folder = tmp_path_factory.mktemp("logs")
    for config in ALIKE.values():
        run(config, Execution(logs=folder / "1", threads=1))
    for count in (2, 4):
        codes = run_ranks(list(ALIKE.values()), folder / str(count), count)
        assert codes == [0] * count, complaint(folder / str(count))
    return folder


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ALIKE)
def test_several_processes_do_what_one_does_on_the_joined_batch(logs, name, count):
    alone, together = (logs / str(number) / ALIKE[name].folder for number in (1, count))
    for file in ("epochs.csv", "refreshes.csv") if (alone / "refreshes.csv").exists() else ("epochs.csv",):
        for row, other in zip(numbers(together, file), numbers(alone, file), strict=True):
            assert row == pytest.approx(other, rel=1e-7, abs=1e-9)
    for key, weights in final_weights(alone).items():
        torch.testing.assert_close(final_weights(together)[key], weights, rtol=1e-9, atol=1e-11)


def test_the_header_counts_the_processes_and_one_of_them_wrote_the_log(logs):
    folder = logs / "4" / SMALL.folder
    assert read_header(folder)["ranks"] == 4
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "epochs.csv", "run.json"]
    assert [complaint(logs / "4", rank) for rank in range(4)] == [""] * 4


def test_a_share_of_a_batch_has_batch_norm_statistics_of_its_own(tmp_path):
    config = RunConfig(SGDConfig(), "digits", "resnet18", epochs=1, width=8, train_samples=20, batch_size=20)
    assert run_ranks([config], tmp_path / "logs", 2) == [0, 0]
    dataset = load("digits", train_samples=20)
    inputs, targets = next(batches(dataset, 20, seed=0, epoch=0))
    model = build_model("resnet18", dataset, 8, seed=0)
    parts = zip(inputs.chunk(2), targets.chunk(2), strict=True)
    losses = [cross_entropy(model(part), labels).item() for part, labels in parts]
    logged = float(rows(tmp_path / "logs" / config.folder)[0]["train_loss"])
    assert logged == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert logged != pytest.approx(cross_entropy(model(inputs), targets).item(), rel=1e-3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    logs = tmp_path_factory.mktemp("uninterrupted")
    assert run_ranks([LONG], logs, 4) == [0] * 4
    return logs / LONG.folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "victim", "status"),
    [(signal.SIGTERM, 3, "interrupted"), (signal.SIGKILL, 1, "failed"), (signal.SIGKILL, None, "running")],
    ids=["one is asked to stop", "one is killed", "all are killed"],
)
def test_what_befalls_processes_does_not_show_in_the_log(tmp_path, uninterrupted, number, victim, status):
    folder = tmp_path / LONG.folder
    ranks = start_ranks([LONG], tmp_path, 4, checkpoint_minutes=0.01 / 60)
    while not checkpoint.current(folder).exists():
        time.sleep(0.002)
    for rank in range(4) if victim is None else [victim]:
        os.kill(ranks[rank].pid, number)
    assert all(ends(ranks))
    assert read_header(folder)["status"] == status
    assert run_ranks([LONG], tmp_path, 4) == [0] * 4
    assert rows(folder) == rows(uninterrupted)
    assert rows(folder, "refreshes.csv") == rows(uninterrupted, "refreshes.csv")


def test_a_run_of_several_processes_goes_on_in_one_and_says_so(tmp_path, uninterrupted):
    folder = tmp_path / LONG.folder
    ranks = start_ranks([LONG], tmp_path, 2)
    while not (folder / "epochs.csv").exists():
        time.sleep(0.002)
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert ends(ranks) == [143, 143]
    run(LONG, Execution(logs=tmp_path, threads=1))
    header = read_header(folder)
    assert (header["ranks"], header["resumed"][0]["ranks"]) == (2, 1)
    for row, other in zip(rows(folder), rows(uninterrupted), strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-4)


def test_a_folder_in_use_is_refused_by_every_process(tmp_path):
    with RunLog(tmp_path / SMALL.folder):
        assert run_ranks([SMALL], tmp_path, 2) == [1, 1]
    for rank in range(2):
        assert "LogError: another process is working on" in complaint(tmp_path, rank)


def test_a_single_process_of_torchrun_writes_the_bytes_of_one_without_it(logs, tmp_path):
    assert run_ranks([ALIKE["cao"]], tmp_path, 1) == [0]
    for file in ("epochs.csv", "refreshes.csv"):
        assert rows(tmp_path / ALIKE["cao"].folder, file) == rows(logs / "1" / ALIKE["cao"].folder, file)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SMALL, batch_size=30), "batch_size must be a multiple of torchrun's 4 processes, got 30; .*-size 28"),
        (replace(SMALL, curvature_samples=2), "curvature_samples must .* got 2; try --curvature-samples 4"),
        (replace(SMALL, optimizer=AdaHessianConfig()), "adahessian takes its curvature .* start it without torchrun"),
    ],
)
def test_a_run_that_cannot_be_shared_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        check_config(config, 4)


def test_nccl_without_a_gpu_is_refused():
    assert backend_for(Execution(device="cpu")) == "gloo"
    with pytest.raises(ConfigError, match=r"--backend nccl needs GPUs .* use gloo or auto"):
        backend_for(Execution(device="cpu", backend="nccl"))

"""What training runs, contests and sweeps have in common: the first record of their logs, and who carries them out."""

import json
import pickle

import pytest

from cao_lab.config import Execution, RunConfig
from cao_lab.reporting.logreader import load_logs
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.solvers.budget import Budget
from cao_lab.solvers.contest import Contest
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.suites.contests import ContestRun
from cao_lab.suites.launch import to_bytes
from cao_lab.suites.robust import SweepRun
from cao_lab.suites.runner import TrainingRun
from cao_lab.sweeps import sweep
from cao_lab.sweeps.problems import Recipe, regression
from cao_lab.tasks.pde.problem import ProblemConfig

TINY = ProblemConfig(width=4, depth=1, interior=20, initial=5, boundary=3, seed=7)
WORKS = {
    "training": TrainingRun(RunConfig(SGDConfig(), epochs=1, width=8)),
    "solver": ContestRun(Contest("regression", TINY, {"adam": Adam()}, adam=0, budget=Budget(5), records=2), "tiny"),
    "sweep": SweepRun(Recipe("linear-regression", "full", None, 10, regression), 1),
}
SHARED = ["format", "kind", "status", "suite", "task", "label", "seed"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "METHODS", {"sgd": sweep.METHODS["sgd"]})
        for work in WORKS.values():
            assert work.outcome(folder) is None
            assert work.carry_out(Execution(logs=folder, threads=1)) == 0
    return folder


@pytest.mark.parametrize("kind", WORKS)
def test_every_kind_begins_with_the_same_record_and_knows_that_it_is_over(logs, kind):
    work = WORKS[kind]
    header = json.loads((logs / work.folder / "run.json").read_text())
    assert list(header)[: len(SHARED)] == SHARED
    assert (header["format"], header["kind"], header["status"]) == (2, kind, "finished")
    assert set(header) >= {"versions", "git_commit", "device", "threads", "started_at", "ended_at", "message"}
    assert work.outcome(logs) == "finished"
    assert 0 < work.done(logs) <= work.size


@pytest.mark.parametrize("kind", WORKS)
def test_every_kind_can_be_sent_to_a_process(kind):
    assert pickle.loads(to_bytes(WORKS[kind], Execution())) == (WORKS[kind], Execution())


def test_a_report_of_training_runs_passes_over_the_other_kinds(logs):
    read = load_logs(logs)
    assert read.missing == ()
    assert list(read.runs["task"]) == ["digits-mlpw8"]

"""Suites of full-batch solvers: what is fixed in advance, what is logged, and that nothing is run twice."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cao_lab.config import ConfigError, Execution
from cao_lab.log.header import read_solve
from cao_lab.log.records import LogError
from cao_lab.solvers import solving as solving_module
from cao_lab.solvers.budget import Budget
from cao_lab.solvers.contest import Contest, carry_out, is_over, prices, with_seed
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.solvers.methods.nncg import NNCG
from cao_lab.solvers.methods.quasi_newton import TorchLBFGS
from cao_lab.solvers.methods.sketched import Sketched
from cao_lab.solvers.solving import adam_phase
from cao_lab.suites.contests import list_contests, run_contests
from cao_lab.suites.scientific import METHODS, PROBLEMS, SCIENTIFIC, SEEDS
from cao_lab.suites.scientific2 import CROSSOVER, SCIENTIFIC_2, SCIENTIFIC_2_POINTS
from cao_lab.tasks.pde.problem import ProblemConfig

TINY = ProblemConfig(width=4, depth=1, interior=20, initial=5, boundary=3, seed=7)
BOTH = {"sketched-lbfgs": Sketched(), "torch-lbfgs": TorchLBFGS()}
CONTEST = Contest("regression", TINY, BOTH, adam=10, budget=Budget(25), records=10)


def carried_out(contest: Contest, folder: Path) -> list[str]:
    return list(carry_out(contest, "tiny", folder))


def header(folder: Path, label: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / CONTEST.folder(label) / "run.json").read_text())
    return loaded


def test_all_problems_have_fresh_seeds_and_all_peers() -> None:
    assert {(one.equation, one.size.seed) for one in SCIENTIFIC} == {(e, s) for e in PROBLEMS for s in (1, 2, 3)}
    assert 0 not in SEEDS
    assert {method.name for method in METHODS.values()} == {
        "sketched-lbfgs", "torch-lbfgs", "scipy-lbfgsb", "scipy-bfgs", "nncg", "lbfgs-nncg", "soap", "adam",
    }  # fmt: skip


def test_each_run_of_the_ring_is_planned_once_and_all_fit_ten_hours() -> None:
    seconds = 0.0
    for suite in (SCIENTIFIC_2, SCIENTIFIC_2_POINTS, CROSSOVER):
        folders = [one.folder(label) for one in suite for label in one.methods]
        assert len(folders) == len(set(folders))
        assert {one.size.seed for one in suite} <= {31, 32, 33, 34, 35}
        seconds += sum(one.budget.seconds * len(one.methods) for one in suite)
    assert seconds < 10 * 3600
    assert [one.equation for one in SCIENTIFIC_2[:8]] == list(PROBLEMS)


def test_seconds_alone_are_a_budget_without_prices(tmp_path: Path) -> None:
    timed = replace(CONTEST, methods={"torch-lbfgs": TorchLBFGS()}, budget=Budget(seconds=0.05))
    carried_out(timed, tmp_path)
    run = read_solve(tmp_path / CONTEST.folder("torch-lbfgs"))
    assert (run.evaluations, run.seconds) == (math.inf, 0.05)
    assert run.records[-1].seconds >= 0.05
    assert run.records[-1].billed == run.records[-1].evaluations
    assert not list(tmp_path.glob("*/prices.json"))
    *_, last = list_contests("tiny", [timed], Execution(logs=tmp_path))
    assert last == "0.0 hours in all"


def test_no_problem_has_more_parameters_than_residuals() -> None:
    for one in SCIENTIFIC[: len(PROBLEMS)]:
        problem = one.problem()
        assert problem.residuals is not None
        assert sum(part.numel() for part in problem.residuals()) > problem.size == 921


def test_every_method_starts_where_the_same_adam_phase_ends(tmp_path: Path) -> None:
    carried_out(CONTEST, tmp_path)
    problem = CONTEST.problem()
    adam_phase(problem, CONTEST.adam)
    expected = float(problem.loss().detach())
    for label in BOTH:
        run = read_solve(tmp_path / CONTEST.folder(label))
        assert run.records[0].loss == pytest.approx(expected, rel=1e-12)
        assert run.records[-1].billed >= 25


def test_a_log_tells_all_that_decided_it(tmp_path: Path) -> None:
    carried_out(CONTEST, tmp_path)
    found = header(tmp_path, "sketched-lbfgs")
    assert (found["status"], found["ended"], found["seed"], found["task"]) == ("finished", "spent", 7, "regression-1x4")
    assert found["method"] == {"name": "sketched-lbfgs", "history_size": 100, "seed": 0}
    assert found["size"]["interior"] == 20
    assert found["price"] == json.loads((tmp_path / "regression-1x4" / "prices.json").read_text())["Sketched"]
    assert found["parameters"] == 17
    assert found["threads"] == torch.get_num_threads()
    assert header(tmp_path, "torch-lbfgs")["price"] == {"product": 0.0, "setup": 0.0}


def test_prices_are_measured_once_for_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prices(CONTEST, tmp_path)
    monkeypatch.setattr(solving_module, "measured_price", lambda *_: pytest.fail("measured again"))
    assert prices(with_seed(CONTEST, 8), tmp_path) == first


def test_a_method_that_joins_later_gets_a_price_and_the_others_keep_theirs(tmp_path: Path) -> None:
    first = prices(CONTEST, tmp_path)
    later = prices(replace(CONTEST, methods={"nncg": NNCG()}), tmp_path)
    assert later["NNCG"].product > 0
    assert later == first | {"NNCG": later["NNCG"]}
    assert first["Sketched"].product > 0


def test_what_is_over_is_not_run_again(tmp_path: Path) -> None:
    assert carried_out(CONTEST, tmp_path) == ["sketched-lbfgs", "torch-lbfgs"]
    assert carried_out(CONTEST, tmp_path) == []
    path = tmp_path / CONTEST.folder("torch-lbfgs") / "run.json"
    path.write_text(path.read_text().replace('"finished"', '"running"'))
    assert carried_out(CONTEST, tmp_path) == ["torch-lbfgs"]


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONTEST, budget=Budget(26)),
        replace(CONTEST, adam=11),
        replace(CONTEST, size=replace(TINY, interior=21)),
        replace(CONTEST, methods={"torch-lbfgs": TorchLBFGS(history_size=5)}),
        replace(CONTEST, methods={"torch-lbfgs": Adam()}),
    ],
)
def test_a_run_that_differs_in_anything_is_another_one(tmp_path: Path, changed: Contest) -> None:
    carried_out(CONTEST, tmp_path)
    assert is_over(CONTEST, "torch-lbfgs", tmp_path)
    assert not is_over(changed, "torch-lbfgs", tmp_path)


def test_a_run_that_was_killed_is_a_log_and_begins_anew(tmp_path: Path) -> None:
    carried_out(CONTEST, tmp_path)
    folder = tmp_path / CONTEST.folder("torch-lbfgs")
    whole = read_solve(folder)
    rows = (folder / "records.csv").read_text()
    (folder / "records.csv").write_text(rows[: len(rows) // 2])
    (folder / "run.json").write_text(json.dumps(header(tmp_path, "torch-lbfgs") | {"status": "running", "ended": None}))
    torn = read_solve(folder)
    assert (torn.status, torn.ended) == ("running", None)
    assert torn.records == whole.records[: len(torn.records)] != whole.records
    carried_out(CONTEST, tmp_path)
    assert [row.loss for row in read_solve(folder).records] == [row.loss for row in whole.records]


def test_contests_run_in_processes_of_their_own_and_failures_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = replace(CONTEST, methods={"torch-lbfgs": TorchLBFGS()})
    bad = replace(good, size=replace(TINY, interior=0))
    prices(good, tmp_path / "tiny")
    assert run_contests("tiny", [good, bad], Execution(logs=tmp_path, threads=1), jobs=2) == 1
    told = capsys.readouterr().out
    assert "finished tiny/regression-1x4/torch-lbfgs/seed7" in told
    assert "ValueError: interior must be from 1 to 25500, got 0" in told
    assert "2 runs ended, 1 failed" in told
    assert read_solve(tmp_path / "tiny" / good.folder("torch-lbfgs")).ended == "spent"


def test_runs_are_listed_with_what_is_over(tmp_path: Path) -> None:
    carried_out(CONTEST, tmp_path / "tiny")
    lines = list(list_contests("tiny", [CONTEST, with_seed(CONTEST, 8)], Execution(logs=tmp_path)))
    assert lines[0].split() == ["over", "tiny/regression-1x4/sketched-lbfgs/seed7"]
    assert lines[2].split() == ["to", "run", "tiny/regression-1x4/sketched-lbfgs/seed8"]
    assert lines[-1] == "120 evaluations in all"


def test_a_suite_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jobs must be at least 1, got 0"):
        run_contests("tiny", [CONTEST], Execution(logs=tmp_path), jobs=0)


def test_a_suite_that_is_asked_to_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_contests import CONTEST\n"
        "from dataclasses import replace; from cao_lab.solvers.budget import Budget\n"
        "from cao_lab.config import Execution; from cao_lab.suites.contests import run_contests\n"
        "endless = replace(CONTEST, budget=Budget(10**9), records=10**7)\n"
        "sys.exit(run_contests('tiny', [endless], Execution(logs=Path(sys.argv[1]), threads=1), 1))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    rows = tmp_path / "tiny" / CONTEST.folder("sketched-lbfgs") / "records.csv"
    while not rows.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "to go on, give the same command again" in process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    size = rows.stat().st_size
    time.sleep(0.3)
    assert rows.stat().st_size == size


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 3, "format must be 1 or 2, got 3"),
        ("status", "idle", "status must be one of running, interrupted, finished, diverged, failed, got 'idle'"),
        ("task", "../x", "task must be the name of a folder"),
        ("price", 3, "price must be an object, got 3"),
        ("budget", {"evaluations": None}, r"budget\.evaluations must be a finite number, got None"),
        ("seed", -1, "seed must be a whole number from 0 on, got -1"),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, key: str, value: object, message: str) -> None:
    carried_out(replace(CONTEST, methods={"torch-lbfgs": TorchLBFGS()}), tmp_path)
    folder = tmp_path / CONTEST.folder("torch-lbfgs")
    (folder / "run.json").write_text(json.dumps(header(tmp_path, "torch-lbfgs") | {key: value}))
    with pytest.raises(LogError, match=rf"run\.json cannot be read \({message}"):
        read_solve(folder)


def test_damaged_records_and_missing_files_are_refused(tmp_path: Path) -> None:
    carried_out(replace(CONTEST, methods={"torch-lbfgs": TorchLBFGS()}), tmp_path)
    folder = tmp_path / CONTEST.folder("torch-lbfgs")
    path = folder / "records.csv"
    path.write_text(path.read_text().replace("\n", "\n1,2,3\n", 1))
    with pytest.raises(LogError, match=r"records\.csv cannot be read \(line 2 is damaged"):
        read_solve(folder)
    with pytest.raises(LogError, match=r"no run\.json"):
        read_solve(tmp_path)

"""A report comes out of any folder that holds a run, twice the same, without torch."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_logs import ADAM, CAO, SGD, Run, decay, suite_of_runs, write_run, write_suite

from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.page import page
from cao_lab.reporting.page_data import page_data
from cao_lab.reporting.report import figures_of, write_report
from cao_lab.reporting.setting import settings
from cao_lab.reporting.tables import make_tables

ROOT = Path(__file__).parents[3]
FIXTURES = Path(__file__).with_name("fixtures")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_reports_of_the_same_logs_are_byte_identical(tmp_path: Path) -> None:
    write_report(FIXTURES / "logs", tmp_path / "one")
    write_report(FIXTURES / "logs", tmp_path / "two")
    first = contents(tmp_path / "one")
    assert first == contents(tmp_path / "two")
    assert {"index.html", "claims.md", "tables/results.csv", "figures/demo/digits-mlp/train-loss.pdf"} <= first.keys()


def test_a_report_tells_on_stderr_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "logs", Run([3.0, 2.0]))
    write_report(tmp_path / "logs", tmp_path / "report")
    told = capsys.readouterr()
    assert told.out == ""
    assert "read: 1 runs; next" in told.err
    assert "drawing: 100%" in told.err


def torn(folder: Path) -> None:
    path = write_run(folder, Run([3.0, 2.0])) / "epochs.csv"
    path.write_text(path.read_text()[:-9])


def without_epochs(folder: Path) -> None:
    (write_run(folder, Run([3.0], status="running")) / "epochs.csv").unlink()


CASES = {
    "a single run": lambda folder: write_run(folder, Run([3.0, 2.0], suite="runs", task="own-model")),
    "half-written": lambda folder: write_run(folder, Run([3.0, 2.0], status="interrupted", budget=20)),
    "torn": torn,
    "without epochs": without_epochs,
    "diverged at once": lambda folder: write_run(folder, Run([math.nan], status="diverged", budget=20)),
    "different lengths": lambda folder: write_suite(folder, [Run([3.0, 2.0]), Run([3.0, 2.0, 1.0], seed=1)]),
    "missing seeds": lambda folder: write_suite(folder, [Run([3.0], "adam", 0, ADAM), Run([3.0], "sgd", 1, SGD)]),
    "automatic damping": lambda folder: write_run(folder, Run([3.0, 2.0], optimizer=CAO | {"damping": "auto"})),
}


@pytest.mark.parametrize("case", CASES)
def test_a_report_comes_out_whatever_the_logs_lack(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path / "logs")
    index = write_report(tmp_path / "logs", tmp_path / "report")
    assert index == tmp_path / "report" / "index.html"
    assert "What is missing" in index.read_text(encoding="utf-8")


def test_the_papers_figures_have_their_names(tmp_path: Path) -> None:
    runs = suite_of_runs("paper", "cifar100-resnet18", 3) + suite_of_runs("paper", "cifar10-resnet34", 3)
    logs = load_logs(write_suite(tmp_path, runs))
    names = set(figures_of(logs, settings(logs)))
    assert {
        "paper/figure-1-train-loss-c100-r18",
        "paper/figure-2-train-loss-c100-r18-early",
        "paper/figure-3-rank-ablation-c100-r18",
        "paper/appendix-b-train-loss-c10-r34",
        "paper/appendix-d-train-accuracy-c100-r18",
    } <= names


def test_a_tuned_suite_shows_each_method_at_its_best_on_fresh_seeds(tmp_path: Path) -> None:
    rates = [Run(decay(5 / rate, 5), f"sgd-lr{rate}", 0, SGD | {"lr": rate}, "mini-tuned") for rate in (0.1, 1.0)]
    fresh = [Run(decay(5, 5), "sgd-lr1.0", seed, SGD | {"lr": 1.0}, "mini-tuned") for seed in (1, 2, 3)]
    found = settings(load_logs(write_suite(tmp_path, rates + fresh)))
    assert set(found[0].best["label"]) == {"sgd-lr1.0"}
    assert set(found[0].best["seed"]) == {1, 2, 3}
    assert '"label":"sgd-lr1.0"' in page_data(found)


def test_reporting_imports_no_torch() -> None:
    code = "import sys, cao_lab.reporting.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_script_of_the_papers_name_writes_the_same_report(tmp_path: Path) -> None:
    write_run(tmp_path / "logs", Run([3.0, 2.0]))
    command = [
        sys.executable,
        str(ROOT / "scripts" / "make_figures.py"),
        str(tmp_path / "logs"),
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "o" / "index.html")
    assert (tmp_path / "o" / "index.html").exists()


def test_the_script_says_in_one_line_that_there_is_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_figures.py"), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no runs in" in done.stderr


@pytest.mark.slow
def test_three_hundred_runs_fit_on_one_page(tmp_path: Path) -> None:
    tasks = ["cifar100-resnet18", "cifar10-resnet18", "cifar10-resnet34", "cifar100-resnet34"]
    for suite in ("paper", "mini"):
        write_suite(tmp_path, [run for task in tasks for run in suite_of_runs(suite, task, 75)])
    logs = load_logs(tmp_path)
    found = settings(logs)
    assert len(page(logs, found, make_tables(logs, found), audit(found), [])) > 1e6


def test_logs_without_training_runs_give_a_page_of_what_they_have(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "logs/robust/mlp", tmp_path / "logs/robust/mlp")
    index = write_report(tmp_path / "logs", tmp_path / "out")
    text = index.read_text(encoding="utf-8")
    assert "The goals of the suite robust" in text
    for picture in re.findall(r'src="([^"]+)"', text):
        assert (tmp_path / "out" / picture).exists()
    assert "robust/loss-by-rate.png" in text

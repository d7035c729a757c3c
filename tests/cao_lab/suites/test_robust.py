"""How the sweeps of the suite robust are carried out."""

from cao_lab.config import Execution
from cao_lab.log.header import read_sweeps
from cao_lab.suites import robust
from cao_lab.suites.robust import SweepRun, list_suite, run_suite
from cao_lab.sweeps.problems import PROBLEMS, Recipe, regression

SHORT = SweepRun(Recipe("linear-regression", "full", None, 10, regression), 1)
WITHOUT_DATA = SweepRun(PROBLEMS[-1], 1)


def test_sweeps_run_in_processes_of_their_own_failures_are_told_and_nothing_is_run_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(robust, "SWEEPS", [SHORT, WITHOUT_DATA])
    monkeypatch.delenv("CAO_DATA", raising=False)
    execution = Execution(logs=tmp_path)
    assert run_suite("robust", execution, jobs=2) == 1
    told = capsys.readouterr().out
    assert "finished robust/linear-regression/seed1" in told
    assert "failed robust/resnet/seed1: DataError: cifar10 needs --data-dir" in told
    assert [(sweep.task, len(sweep.records)) for sweep in read_sweeps(tmp_path / "robust", [])] == [
        ("linear-regression", 11 * SHORT.size)
    ]
    assert SHORT.done(tmp_path) == SHORT.size
    assert list_suite("robust", execution)[0] == "  to run  robust/resnet/seed1"

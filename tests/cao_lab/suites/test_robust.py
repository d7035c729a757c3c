"""How the sweeps of the suite robust are carried out."""

from multiprocessing import get_context

from cao_lab.suites.robust import work
from cao_lab.sweeps.problems import PROBLEMS
from cao_lab.sweeps.sweep import RECORDS, runs_in

NOBODY = -1


def test_a_worker_whose_suite_is_gone_ends_after_the_run_at_hand(tmp_path):
    problem = PROBLEMS[0]
    worker = get_context("spawn").Process(target=work, args=(problem, 1, tmp_path, None, NOBODY))
    worker.start()
    worker.join(timeout=120)
    assert worker.exitcode == 1
    assert len(runs_in(tmp_path / problem.name / "seed1" / RECORDS)) == 1

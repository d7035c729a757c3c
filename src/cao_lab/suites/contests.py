"""Carries out suites of contests: several side by side, each in a process of its own, and only what is not over."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

import torch
from tqdm import tqdm

from cao_lab.config import ConfigError, Execution
from cao_lab.facts import SUITES, suites_of
from cao_lab.runs.stopping import StopRequest, stop_requests
from cao_lab.solvers.contest import Contest, carry_out, is_over, prices
from cao_lab.suites.launch import cores, last_error, start_process
from cao_lab.suites.runner import FAILED, POLL_SECONDS

CONTESTS: dict[str, Sequence[Contest]] = {
    name: resolve_name(f"cao_lab.suites.{SUITES[name].runs}") for name in suites_of(["solvers"])
}

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""torch is told by a call; numpy, which BFGS computes with, by its environment."""


@dataclass
class ContestJob:
    """A contest that a process carries out."""

    contest: Contest
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]


def start(contest: Contest, suite: str, folder: Path, threads: int) -> ContestJob:
    """Start a contest in a process that a Ctrl-C in the terminal does not reach."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
    message, limits = pickle.dumps((contest, suite, folder, threads)), dict.fromkeys(THREAD_LIMITS, str(threads))
    return ContestJob(contest, start_process(message, errors, __name__, {**os.environ, **limits}), errors)


def run_contests(suite: str, contests: Sequence[Contest], execution: Execution, jobs: int) -> int:
    """Carry a suite out and return the exit code: 0, or 1 if a contest failed, or 128 + the signal that stopped it."""
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    folder, threads = execution.logs / suite, execution.threads or max(1, cores() // jobs)
    waiting = [contest for contest in contests if not all_over(contest, folder)]
    measure_prices(waiting, folder, threads)
    failures = 0
    with stop_requests() as stop, progress_bar(contests) as bar:
        running: list[ContestJob] = []
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), suite, folder, threads))
            time.sleep(POLL_SECONDS)
            ended = [job for job in running if job.process.poll() is not None]
            running = [job for job in running if job not in ended]
            failures += sum(not noted(job, folder) for job in ended)
            show(bar, contests, running, folder)
            if stop.signal:
                return interrupted(running, stop)
    tqdm.write(f"{len(contests)} contests, {failures} failed: {folder}")
    return FAILED if failures else 0


def measure_prices(contests: Sequence[Contest], folder: Path, threads: int) -> None:
    """Measure what products cost before anything else runs, with the threads that the runs will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for contest in contests:
        prices(contest, folder)
    torch.set_num_threads(before)


def all_over(contest: Contest, folder: Path) -> bool:
    """Whether every method's log says that it is over."""
    return all(is_over(contest, label, folder) for label in contest.methods)


def noted(job: ContestJob, folder: Path) -> bool:
    """Tell how a contest ended, and return whether well."""
    is_well = all_over(job.contest, folder)
    with job.errors:
        outcome = "finished" if is_well else f"failed ({last_error(job.process, job.errors)})"
    tqdm.write(f"{outcome} {job.contest.task} seed {job.contest.size.seed}")
    return is_well


def interrupted(running: list[ContestJob], stop: StopRequest) -> int:
    """End all processes; a run that was under way begins anew when the command is given again."""
    for job in running:
        job.process.terminate()
    for job in running:
        job.process.wait()
        job.errors.close()
    tqdm.write("stopped; to go on, give the same command again")
    return 128 + stop.signal


def progress_bar(contests: Sequence[Contest]) -> "tqdm[Any]":
    """Return a bar over all runs; hidden where nobody watches."""
    total = sum(len(contest.methods) for contest in contests)
    return tqdm(total=total, unit="run", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)


def show(bar: "tqdm[Any]", contests: Sequence[Contest], running: list[ContestJob], folder: Path) -> None:
    """Bring the bar up to date."""
    if bar.disable:
        return
    names = ", ".join(f"{job.contest.task} seed {job.contest.size.seed}" for job in running)
    bar.set_postfix_str(names, refresh=False)
    bar.n = sum(is_over(contest, label, folder) for contest in contests for label in contest.methods)
    bar.refresh()


def list_contests(suite: str, contests: Sequence[Contest], execution: Execution) -> Iterator[str]:
    """Yield a line for each run of a suite: its folder, and whether it is over."""
    for contest in contests:
        for label in contest.methods:
            state = "over" if is_over(contest, label, execution.logs / suite) else "to run"
            yield f"{state:>8}  {Path(suite) / contest.folder(label)}"
    evaluations = sum(one.adam + len(one.methods) * one.budget.evaluations for one in contests)
    yield f"{evaluations:,.0f} evaluations in all"


def work(contest: Contest, suite: str, folder: Path, threads: int) -> None:
    """Carry out one contest in this process."""
    torch.set_num_threads(threads)
    for _ in carry_out(contest, suite, folder):
        pass


if __name__ == "__main__":
    work(*pickle.load(sys.stdin.buffer))

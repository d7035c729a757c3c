"""Carries a suite of any kind out: so many parts at a time, past failures, and over interruptions."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cao_lab.config import ConfigError, Execution, RunConfig, SlurmOptions, config_from_dict
from cao_lab.log.header import read_header
from cao_lab.log.reading import read_rows
from cao_lab.log.records import EpochRecord, LogError
from cao_lab.runs.stopping import StopRequest, stop_requests
from cao_lab.suites import Suite, find_suite, rounds_of
from cao_lab.suites.launch import FAILED, Job, Launcher, LocalProcesses, Work
from cao_lab.suites.rounds import FinishedRun
from cao_lab.suites.slurm import Slurm

POLL_SECONDS = 0.2
OVER = ("finished", "diverged")


class Stopped(Exception):  # noqa: N818  # not an error
    """The suite was asked to stop, and its parts have ended."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run as a part of a suite."""

    config: RunConfig

    @property
    def folder(self) -> Path:
        """Where its log lies."""
        return self.config.folder

    @property
    def size(self) -> int:
        """Its epochs."""
        return self.config.epochs

    def done(self, logs: Path) -> int:
        """Return how many rows it has written."""
        path = logs / self.folder / "epochs.csv"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def outcome(self, logs: Path) -> str | None:
        """Return the status if the log says that this very run needs no more work."""
        try:
            header = read_header(logs / self.folder) or {}
            is_over = header.get("status") in OVER and config_from_dict(header["config"]) == self.config
            return str(header["status"]) if is_over else None
        except (LogError, ConfigError, KeyError):
            return None

    def carry_out(self, execution: Execution) -> int:
        """Run as `cao train` would."""
        from cao_lab.runs.session import run  # noqa: PLC0415  # torch is not for those who only start processes

        return run(self.config, execution).exit_code

    def finished(self, logs: Path) -> FinishedRun:
        """Return the run with the rows it left, however it ended."""
        folder = logs / self.folder
        try:
            epochs = read_rows(folder / "epochs.csv", EpochRecord).records
        except LogError as error:
            raise LogError(f"{folder}: {error}; remove the folder to run it anew") from error
        try:
            header = read_header(folder) or {}
        except LogError:
            header = {}
        return FinishedRun(self.config, header.get("status", "failed"), epochs)


class SuiteRunner:
    """The state of a suite under way."""

    def __init__(
        self,
        execution: Execution,
        jobs: int,
        stop: StopRequest,
        launcher: Launcher | None = None,
        unit: str = "epoch",
    ) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs must be at least 1, got {jobs}")
        self.stop = stop
        self.launcher: Launcher = launcher or LocalProcesses(jobs)
        self.threads = execution.threads or self.launcher.threads
        self.execution = replace(execution, threads=self.threads)
        self.failures: dict[Path, str] = {}
        self.done: dict[Path, int] = {}
        self.ended = 0
        self.bar: tqdm[Any] = tqdm(total=0, unit=unit, leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def carry_out(self, works: Sequence[Work]) -> None:
        """Carry out what is not over yet."""
        logs = self.execution.logs
        self.bar.total = (self.bar.total or 0) + sum(work.size for work in works)
        waiting = [work for work in works if work.outcome(logs) is None]
        self.done |= {work.folder: work.size for work in works if work not in waiting}
        self.ended += len(works) - len(waiting)
        running: list[Job] = []
        while waiting or running:
            room = self.launcher.room - len(running)
            if waiting and room > 0:
                running += self.launcher.start(waiting[:room], self.execution)
                waiting = waiting[room:]
            time.sleep(POLL_SECONDS)
            ended = [job for job in running if job.has_ended]
            running = [job for job in running if job not in ended]
            for job in ended:
                self.note_end(job)
            self.show(running)
            if self.stop.signal:
                self.interrupt(running)

    def run_round(self, configs: list[RunConfig]) -> list[FinishedRun]:
        """Carry out training runs, and return all in the order they were asked for."""
        runs = [TrainingRun(config) for config in configs]
        self.carry_out(runs)
        return [run.finished(self.execution.logs) for run in runs]

    def note_end(self, job: Job) -> None:
        """Count a part that has ended, and remember why if it failed."""
        folder = job.work.folder
        self.done[folder] = job.work.size
        self.ended += 1
        if outcome := job.work.outcome(self.execution.logs):
            tqdm.write(f"{outcome} {folder}")
        else:
            self.failures[folder] = job.reason
            tqdm.write(f"failed {folder}: {job.reason}")

    def interrupt(self, running: list[Job]) -> None:
        """Ask all parts to save and stop, wait for them, and stop as well."""
        for job in running:
            job.stop()
        for job in running:
            job.wait()
        raise Stopped

    def show(self, running: Iterable[Job]) -> None:
        """Bring the one progress bar of the suite up to date."""
        if self.bar.disable:
            return
        self.done |= {job.work.folder: job.work.done(self.execution.logs) for job in running}
        names = ", ".join(str(Path(*job.work.folder.parts[-2:])) for job in running)
        self.bar.set_description_str(f"{self.ended} runs ended", refresh=False)
        self.bar.set_postfix_str(names, refresh=False)
        self.bar.n = sum(self.done.values())
        self.bar.refresh()


def slurm_launcher(options: SlurmOptions, jobs: int, execution: Execution, suite: str) -> Slurm:
    """Return what submits runs to Slurm; its files lie beside the logs, where all machines see them."""
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    return Slurm(options, jobs, execution.logs.absolute() / ".slurm" / suite)


def run_suite(name: str, execution: Execution, jobs: int, slurm: SlurmOptions | None = None) -> int:
    """Carry a suite of training runs out and return the exit code."""
    folder, suite = find_suite(name)
    with stop_requests() as stop:
        launcher = slurm_launcher(slurm, jobs, execution, folder) if slurm else None
        runner = SuiteRunner(execution, jobs, stop, launcher)
        return concluded(runner, lambda: all_rounds(runner, folder, suite), folder)


def run_works(works: Sequence[Work], execution: Execution, jobs: int, suite: str, unit: str) -> int:
    """Carry a suite out of which no part waits for another, and return the exit code."""
    with stop_requests() as stop:
        runner = SuiteRunner(execution, jobs, stop, unit=unit)
        return concluded(runner, lambda: runner.carry_out(works), suite)


def all_rounds(runner: SuiteRunner, folder: str, suite: Suite) -> None:
    """Carry out round after round, as long as none of those fail that the next depend on."""
    rounds = rounds_of(suite)
    configs = next(rounds, None)
    while configs is not None:
        finished = runner.run_round([replace(config, suite=folder) for config in configs])
        if callable(suite) and runner.failures:
            tqdm.write("the next runs depend on those that failed: mend them and give the same command again")
            return
        try:
            configs = rounds.send(finished)
        except StopIteration:
            return


def concluded(runner: SuiteRunner, carry_out: Callable[[], None], folder: str) -> int:
    """Return 0 when all is over, or 1 if a part failed, or 128 + the signal that stopped the suite."""
    try:
        carry_out()
    except Stopped:
        tqdm.write(f"stopped after {runner.ended} runs; to go on, give the same command again")
        return 128 + runner.stop.signal
    finally:
        runner.bar.close()
    tqdm.write(f"{runner.ended} runs ended, {len(runner.failures)} failed: {runner.execution.logs / folder}")
    for path, reason in runner.failures.items():
        tqdm.write(f"failed {path}: {reason}")
    return FAILED if runner.failures else 0

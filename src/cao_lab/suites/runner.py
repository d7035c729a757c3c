"""Carries a suite out: so many runs at a time, past failures, and over interruptions."""

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cao_lab.config import ConfigError, Execution, RunConfig, SlurmOptions, config_from_dict
from cao_lab.log.header import read_header
from cao_lab.log.reading import read_rows
from cao_lab.log.records import EpochRecord, LogError
from cao_lab.runs.stopping import StopRequest, stop_requests
from cao_lab.suites import find_suite, rounds_of
from cao_lab.suites.launch import Job, Launcher, LocalProcesses
from cao_lab.suites.rounds import FinishedRun
from cao_lab.suites.slurm import Slurm

POLL_SECONDS = 0.2
FAILED = 1
OVER = ("finished", "diverged")


class Stopped(Exception):  # noqa: N818  # not an error
    """The suite was asked to stop, and its runs have been saved."""


class SuiteRunner:
    """The state of a suite under way."""

    def __init__(self, execution: Execution, jobs: int, stop: StopRequest, launcher: Launcher | None = None) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs must be at least 1, got {jobs}")
        self.stop = stop
        self.launcher: Launcher = launcher or LocalProcesses(jobs)
        self.threads = execution.threads or self.launcher.threads
        self.execution = replace(execution, threads=self.threads)
        self.failures: dict[Path, str] = {}
        self.epochs: dict[Path, int] = {}
        self.runs_over = 0
        self.bar = tqdm(total=0, unit="epoch", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def run_round(self, configs: list[RunConfig]) -> list[FinishedRun]:
        """Carry out what is not over yet and return all, in the order they were asked for."""
        self.bar.total = (self.bar.total or 0) + sum(config.epochs for config in configs)
        waiting = [config for config in configs if not self.is_over(config)]
        self.epochs |= {config.folder: config.epochs for config in configs if config not in waiting}
        self.runs_over += len(configs) - len(waiting)
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
        return [self.finished(config) for config in configs]

    def is_over(self, config: RunConfig) -> bool:
        """Whether the log says that this very run needs no more work."""
        try:
            header = read_header(self.execution.logs / config.folder)
            return header is not None and header["status"] in OVER and config_from_dict(header["config"]) == config
        except (LogError, ConfigError, KeyError):
            return False

    def note_end(self, job: Job) -> None:
        """Count a run that has ended, and remember why if it failed."""
        folder = job.config.folder
        self.epochs[folder] = job.config.epochs
        self.runs_over += 1
        if self.is_over(job.config):
            tqdm.write(f"{self.header(job.config)['status']} {folder}")
        else:
            self.failures[folder] = job.reason
            tqdm.write(f"failed {folder}: {self.failures[folder]}")

    def interrupt(self, running: list[Job]) -> None:
        """Ask all runs to save and stop, wait for them, and stop as well."""
        for job in running:
            job.stop()
        for job in running:
            job.wait()
        raise Stopped

    def finished(self, config: RunConfig) -> FinishedRun:
        """Return a run with the rows it left."""
        folder = self.execution.logs / config.folder
        try:
            epochs = read_rows(folder / "epochs.csv", EpochRecord).records
        except LogError as error:
            raise LogError(f"{folder}: {error}; remove the folder to run it anew") from error
        return FinishedRun(config, self.header(config).get("status", "failed"), epochs)

    def header(self, config: RunConfig) -> dict[str, Any]:
        """Return what run.json says of a run, nothing if there is none that can be read."""
        try:
            return read_header(self.execution.logs / config.folder) or {}
        except LogError:
            return {}

    def epochs_done(self, config: RunConfig) -> int:
        """Return how many rows a run under way has written."""
        path = self.execution.logs / config.folder / "epochs.csv"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def show(self, running: Iterable[Job]) -> None:
        """Bring the one progress bar of the suite up to date."""
        self.epochs |= {job.config.folder: self.epochs_done(job.config) for job in running}
        names = ", ".join(f"{job.config.label} seed {job.config.seed}" for job in running)
        self.bar.set_description_str(f"{self.runs_over} runs ended", refresh=False)
        self.bar.set_postfix_str(names, refresh=False)
        self.bar.n = sum(self.epochs.values())
        self.bar.refresh()


def slurm_launcher(options: SlurmOptions, jobs: int, execution: Execution, suite: str) -> Slurm:
    """Return what submits runs to Slurm; its files lie beside the logs, where all machines see them."""
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    return Slurm(options, jobs, execution.logs.absolute() / ".slurm" / suite)


def run_suite(name: str, execution: Execution, jobs: int, slurm: SlurmOptions | None = None) -> int:
    """Carry a suite out and return the exit code: 0, or 1 if a run failed, or 128 + the signal that stopped it."""
    folder, suite = find_suite(name)
    with stop_requests() as stop:
        launcher = slurm_launcher(slurm, jobs, execution, folder) if slurm else None
        runner = SuiteRunner(execution, jobs, stop, launcher)
        try:
            rounds = rounds_of(suite)
            configs = next(rounds, None)
            while configs is not None:
                finished = runner.run_round([replace(config, suite=folder) for config in configs])
                if callable(suite) and runner.failures:
                    tqdm.write("the next runs depend on those that failed: mend them and give the same command again")
                    break
                try:
                    configs = rounds.send(finished)
                except StopIteration:
                    configs = None
        except Stopped:
            tqdm.write(f"stopped after {runner.runs_over} runs; to go on, give the same command again")
            return 128 + stop.signal
        finally:
            runner.bar.close()
    tqdm.write(f"{runner.runs_over} runs ended, {len(runner.failures)} failed: {execution.logs / folder}")
    for path, reason in runner.failures.items():
        tqdm.write(f"failed {path}: {reason}")
    return FAILED if runner.failures else 0

"""One run from start to end on disk: it continues what is there, saves as it goes, and stops when asked to."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cao_lab.config import (
    ConfigError,
    Execution,
    RunConfig,
    command_line,
    config_from_dict,
    config_to_dict,
    differences,
)
from cao_lab.failures import is_expected
from cao_lab.log.header import read_header
from cao_lab.log.records import EpochRecord, LogError, Status
from cao_lab.log.writing import RunLog
from cao_lab.runs import checkpoint
from cao_lab.runs.display import Display, tensorboard_writer
from cao_lab.runs.provenance import circumstances, new_header, now, settle_arithmetic
from cao_lab.runs.ranks import Ranks, joined_ranks, ranks_started
from cao_lab.runs.stopping import StopRequest, stop_requests
from cao_lab.runs.training import Training
from cao_lab.tasks.data import load

# Epochs of small problems take milliseconds, and saving each of them would take longer than the training.
SECONDS_BETWEEN_CHECKPOINTS = 1.0

DIVERGED = 3


class Interrupted(Exception):  # noqa: N818  # not an error
    """The run was asked to stop by a signal, and has been saved."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass(frozen=True)
class Outcome:
    """How a run ended, where its log is, and what there is to say about it."""

    status: Status
    folder: Path
    message: str
    exit_code: int


def run(config: RunConfig, execution: Execution) -> Outcome:
    """Carry a run out, or on from where it was stopped."""
    with joined_ranks(config, execution) as ranks:
        return run_with(ranks, config, execution)


def run_with(ranks: Ranks, config: RunConfig, execution: Execution) -> Outcome:
    """Carry a run out together with other processes, if there are any."""
    folder = execution.logs / config.folder
    outcome = ranks.first_says(lambda: already_ended(config, folder))
    if outcome is not None:
        return outcome
    # Settings, data and device are tried before the folder is made: a run that is refused leaves nothing behind.
    training = new_training(config, execution, ranks)
    with log_of(folder, ranks) as log:
        # Another process may have been at work here until a moment ago.
        outcome = ranks.first_says(lambda: already_ended(config, folder))
        if outcome is not None:
            return outcome
        session = Session(training, execution, log) if ranks.is_first else Follower(training, execution, log)
        with session.recorded_failure():
            return session.run()


@contextmanager
def log_of(folder: Path, ranks: Ranks) -> Iterator[RunLog]:
    """Let the first process take the folder; if it cannot, every process raises the reason."""
    log = RunLog(folder)
    ranks.first_says(log.open)
    try:
        yield log
    finally:
        if ranks.is_first:
            log.close()


def already_ended(config: RunConfig, folder: Path) -> Outcome | None:
    """Report a run that needs no further work; another run in the same folder is an error."""
    header = read_header(folder)
    if header is None:
        return None
    check_same_config(header, config, folder)
    status = header["status"]
    if status not in ("finished", "diverged"):
        return None
    exit_code = DIVERGED if status == "diverged" else 0
    return Outcome(status, folder, f"{folder} has already {status}", exit_code)


def check_same_config(header: dict[str, Any], config: RunConfig, folder: Path) -> None:
    """Refuse to mix two different runs in one folder."""
    changes = differences(config_from_dict(header.get("config", {})), config)
    if changes:
        listing = "; ".join(changes)
        raise LogError(
            f"{folder} holds a run with another config ({listing}); use another --suite or --logs, or remove it"
        )


def new_training(config: RunConfig, execution: Execution, ranks: Ranks) -> Training:
    """Load the data and build the model and its optimizer, or say what is wrong with them."""
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    settle_arithmetic()
    if execution.tensorboard:
        tensorboard_writer()
    device = choose_device(execution.device)
    return Training(config, load(config.dataset, execution.data_dir, config.train_samples), device, ranks)


def choose_device(name: str) -> torch.device:
    """Return the device that is meant, a GPU for `auto` if there is one; each process of torchrun has its own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks_started() == 1:
        return torch.device("cuda")
    place, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if place >= gpus:
        raise ConfigError(f"torchrun started more processes here than there are GPUs; use --nproc-per-node {gpus}")
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


class Session:
    """A run that has its log's lock."""

    def __init__(self, training: Training, execution: Execution, log: RunLog) -> None:
        self.training, self.execution, self.log = training, execution, log
        self.config, self.ranks = training.config, training.ranks
        self.saved_at = time.monotonic()
        self.last: EpochRecord | None = None

    @contextmanager
    def recorded_failure(self) -> Iterator[None]:
        """Leave the reason in run.json, and a mistake of ours in traceback.txt; the error itself goes on its way."""
        try:
            yield
        except Exception as error:
            # On a full disk this cannot be written either; the checkpoint is intact all the same.
            with suppress(OSError):
                self.write_end("failed", f"{type(error).__name__}: {error}")
                if not is_expected(error):
                    (self.log.folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            raise

    def run(self) -> Outcome:
        """Train to the end, to a divergence, or to a request to stop."""
        self.begin()
        with stop_requests() as stop, Display(self.training, self.log.folder, self.execution) as display:

            def after_step(_: Training) -> None:
                display.step()
                self.save_if_long_ago(stop)

            try:
                for record in self.training.epochs(after_step):
                    self.write(record)
                    display.epoch(record)
                    self.stop_if_asked(stop)
            except Interrupted as interrupted:
                return self.end("interrupted", exit_code=128 + interrupted.signal)
        return self.finish()

    def begin(self) -> None:
        """Take the run up in the first process, and in all others where that one has."""

        def resumed_state() -> bytes:
            self.resume()
            return checkpoint.to_bytes(self.training.state_dict()) if self.ranks.count > 1 else b""

        state = self.ranks.first_says(resumed_state)
        if not self.ranks.is_first:
            self.training.load_state_dict(checkpoint.from_bytes(state))

    def resume(self) -> None:
        """Go on from the last whole checkpoint, or begin, with the log cut back to match."""
        rows = checkpoint.load(self.log.folder, print_warning, self.restore)
        self.log.cut_back(**(rows or {"epochs": 0, "refreshes": 0}))
        header = self.log.header
        if header is None or rows is None:
            self.log.write_header(self.header())
        else:
            here = {**circumstances(self.training.device), "ranks": self.ranks.count}
            resumed = [*(header.get("resumed") or []), {"at": now(), **here}]
            self.log.update_header(status="running", ended_at=None, message=None, resumed=resumed)

    def restore(self, saved: checkpoint.State) -> dict[str, int]:
        """Take up the training from a checkpoint, and return how many rows of the log belong to it."""
        rows = {name: saved["rows"][name] for name in ("epochs", "refreshes")}
        training = self.training
        try:
            training.load_state_dict(saved["training"])
            if rows["epochs"] != training.progress.epoch or type(rows["refreshes"]) is not int or rows["refreshes"] < 0:
                raise ValueError(f"it counts {rows} rows after {training.progress.epoch} epochs")
        except Exception:
            # A part of the state may have been taken over.
            self.training = Training(self.config, training.task.dataset, training.device, training.ranks)
            raise
        return rows

    def header(self) -> dict[str, Any]:
        """Return what run.json says at the start."""
        training, config = self.training, self.config
        facts = {
            "config": config_to_dict(config),
            "parameters": sum(p.numel() for p in training.task.params),
            "steps_per_epoch": training.steps_per_epoch,
            "command": command_line(config),
            "ranks": self.ranks.count,
            "resumed": [],
        }
        place = (config.suite, config.task, config.label, config.seed)
        return new_header("training", place, facts, training.device)

    def write(self, record: EpochRecord) -> None:
        """Append the rows of an epoch, and save unless that was done a moment ago."""
        self.log.check_lock()
        self.write_refreshes()
        self.log.epochs.append([record])
        self.last = record
        if time.monotonic() - self.saved_at >= SECONDS_BETWEEN_CHECKPOINTS:
            self.save()

    def write_refreshes(self) -> None:
        """Append the eigenvalues found since the last time."""
        if self.training.new_refreshes:
            self.log.refreshes.append(self.training.new_refreshes)
            self.training.new_refreshes.clear()

    def save_if_long_ago(self, stop: StopRequest) -> None:
        """Save within an epoch: when the interval is over, or to stop here."""
        if time.monotonic() - self.saved_at >= 60 * self.execution.checkpoint_minutes:
            self.save()
        self.stop_if_asked(stop)

    def stop_if_asked(self, stop: StopRequest) -> None:
        """Save and leave if any process was asked to, unless there is nothing left to do."""
        signal = self.ranks.largest(stop.signal, self.training.device)
        if signal and self.training.progress.epoch < self.config.epochs:
            self.save()
            raise Interrupted(signal)

    def save(self) -> None:
        """Write a checkpoint; the rows it counts on reach the disk before it."""
        with self.training.meter.excluded():
            self.log.check_lock()
            self.write_refreshes()
            self.log.sync()
            rows = {"epochs": self.log.epochs.rows, "refreshes": self.log.refreshes.rows}
            checkpoint.save({"rows": rows, "training": self.training.state_dict()}, self.log.folder)
        self.saved_at = time.monotonic()

    def finish(self) -> Outcome:
        """Save what was reached at the end."""
        self.save()
        if self.ranks.is_first:
            checkpoint.forget_previous(self.log.folder)
        if not self.training.progress.has_diverged:
            return self.end("finished")
        message = f"the loss became non-finite in epoch {self.training.progress.epoch}"
        return self.end("diverged", DIVERGED, message)

    def end(self, status: Status, exit_code: int = 0, message: str | None = None) -> Outcome:
        """Write the last word into the header."""
        self.write_end(status, message)
        progress = self.training.progress
        where = f"after {progress.epoch} of {self.config.epochs} epochs"
        text = f"{status} {where}{figures(self.last)}: {self.log.folder}" + (f" ({message})" if message else "")
        return Outcome(status, self.log.folder, text, exit_code)

    def write_end(self, status: Status, message: str | None) -> None:
        """Let the header say how the run ended."""
        self.log.update_header(status=status, ended_at=now(), message=message)


class Follower(Session):
    """A session of any process but the first: it trains along, and leaves log and checkpoints to that one."""

    def write(self, record: EpochRecord) -> None:
        """Forget what the first process writes."""
        self.training.new_refreshes.clear()

    def save(self) -> None:
        """Leave the checkpoint to the first process."""

    def write_end(self, status: Status, message: str | None) -> None:
        """Leave the header to the first process."""


def figures(record: EpochRecord | None) -> str:
    """Return what the last epoch reached, nothing if there was none."""
    if record is None:
        return ""
    accuracy = "" if record.test_accuracy is None else f", test accuracy {record.test_accuracy:.4g}"
    return f", train loss {record.train_loss:.4g}, test loss {record.test_loss:.4g}{accuracy}"


def print_warning(text: str) -> None:
    """Say something that the user should know, beside whatever else is on the terminal."""
    sys.stderr.write(f"warning: {text}\n")

"""The parts of a suite of any kind, and where they are carried out: each in a process of this machine.

A launcher for another place, such as a cluster, is a class with the same `start`, whose jobs have the methods of `Job`.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn, Protocol

from cao_lab.config import ConfigError, Execution

FAILED = 1
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""torch is told by a call; numpy, which dense BFGS computes with, by its environment."""


class Work(Protocol):
    """A part of a suite: a training run, a contest of solvers, a sweep over rates. It can be pickled."""

    @property
    def folder(self) -> Path:
        """Where its log lies below that of all logs, which is its name too."""
        ...

    @property
    def size(self) -> int:
        """How much there is to do, in the units of the progress bar."""
        ...

    def done(self, logs: Path) -> int:
        """Return how much of it is done."""
        ...

    def outcome(self, logs: Path) -> str | None:
        """Return how it ended; None if the log says that there is work left."""
        ...

    def carry_out(self, execution: Execution) -> int:
        """Do what is left in this process, and return its exit code."""
        ...


class Job(Protocol):
    """A part that is being carried out somewhere."""

    work: Work
    reason: str
    """Once it has ended, the last thing that it complained about."""

    @property
    def has_ended(self) -> bool:
        """Whether it is over, for better or worse."""
        ...

    def stop(self) -> None:
        """Ask it to save and stop."""
        ...

    def wait(self) -> None:
        """Wait until it is over."""
        ...


class Launcher(Protocol):
    """What starts the parts of a suite."""

    @property
    def room(self) -> int:
        """How many it takes at a time."""
        ...

    @property
    def threads(self) -> int:
        """How many threads each has, unless the user says."""
        ...

    def start(self, works: Sequence[Work], execution: Execution) -> Sequence[Job]:
        """Start some, no more than there is room for, and return at once."""
        ...


class LocalProcesses:
    """Starts each part as a process of its own on this machine, spread over its GPUs if there are several."""

    def __init__(self, jobs: int) -> None:
        self.room, self.threads = jobs, max(1, cores() // jobs)
        self.gpus, self.jobs = gpus(), list["LocalJob"]()

    def start(self, works: Sequence[Work], execution: Execution) -> list["LocalJob"]:
        """Start processes that a Ctrl-C in the terminal does not reach."""
        started = []
        for work in works:
            self.jobs = [job for job in self.jobs if not job.has_ended]
            busy = [job.gpu for job in self.jobs]
            gpu = min(self.gpus, key=busy.count, default=None) if execution.device != "cpu" else None
            self.jobs.append(LocalJob(work, execution, gpu))
            started.append(self.jobs[-1])
        return started


def gpus() -> list[str]:
    """Return the GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # noqa: PLC0415  # not for those who start nothing

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


class LocalJob:
    """A part that a process of this machine carries out."""

    def __init__(self, work: Work, execution: Execution, gpu: str | None = None) -> None:
        self.work, self.gpu, self.reason = work, gpu, "it is still running"
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
        self.process = start_process(to_bytes(work, execution), self.errors, execution.threads, gpu)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; if so, the last line on its standard error is the reason."""
        if self.process.poll() is None:
            return False
        if not self.errors.closed:
            with self.errors:
                self.errors.seek(0)
                lines = self.errors.read().decode(errors="replace").strip().splitlines()
            self.reason = lines[-1] if lines else f"exit code {self.process.returncode}"
        return True

    def stop(self) -> None:
        """Send SIGTERM, at which a training run saves and stops, and anything else begins anew the next time."""
        self.process.terminate()

    def wait(self) -> None:
        """Wait for the process."""
        self.process.wait()
        self.errors.close()


def start_process(
    message: bytes, stderr: IO[bytes] | None, threads: int | None = None, gpu: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process that does what a message of `to_bytes` says, on one GPU if it is told which."""
    limits = {} if threads is None else dict.fromkeys(THREAD_LIMITS, str(threads))
    limits |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, **limits},
    )
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.close()
    return process


def to_bytes(work: Work, execution: Execution) -> bytes:
    """Return what `carried_out` reads."""
    return pickle.dumps((work, execution))


def carried_out(message: bytes) -> NoReturn:
    """Do what a message says, and leave the reason of a failure as the last line on standard error."""
    work, execution = pickle.loads(message)
    try:
        sys.exit(work.carry_out(execution))
    except (ConfigError, ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(FAILED)


def cores() -> int:
    """Return how many cores this process may use."""
    # Not every system tells which cores are ours.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    carried_out(sys.stdin.buffer.read())

"""Where the runs of a suite are carried out: each is a process on this machine.

A launcher for another place, such as a cluster, is a class with the same `start`, whose jobs have the methods of `Job`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from cao_lab.config import ConfigError, Execution, RunConfig, config_from_dict, config_to_dict

FAILED = 1


class Job(Protocol):
    """A run that is being carried out somewhere."""

    config: RunConfig
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
    """What starts runs."""

    @property
    def room(self) -> int:
        """How many runs it takes at a time."""
        ...

    @property
    def threads(self) -> int:
        """How many threads a run has, unless the user says."""
        ...

    def start(self, configs: Sequence[RunConfig], execution: Execution) -> Sequence[Job]:
        """Start runs, no more than there is room for, and return at once."""
        ...


class LocalProcesses:
    """Starts each run as a process of its own on this machine."""

    def __init__(self, jobs: int) -> None:
        self.room, self.threads = jobs, max(1, cores() // jobs)

    def start(self, configs: Sequence[RunConfig], execution: Execution) -> list["LocalJob"]:
        """Start runs in processes that a Ctrl-C in the terminal does not reach."""
        return [self._started(config, execution) for config in configs]

    def _started(self, config: RunConfig, execution: Execution) -> "LocalJob":
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
        return LocalJob(config, start_process(to_json(config, execution).encode(), errors), errors)


def start_process(
    message: bytes,
    stderr: IO[bytes] | None,
    module: str = __name__,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process that does the work that a message describes: that of `to_json`, or another module's."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.close()
    return process


def last_error(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> str:
    """Return the last line that an ended process left on standard error."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"


class LocalJob:
    """A run that a process of this machine carries out."""

    def __init__(self, config: RunConfig, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self.config, self.process, self.errors = config, process, errors
        self.reason = "it is still running"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; if so, the last line on its standard error is the reason."""
        if self.process.poll() is None:
            return False
        if not self.errors.closed:
            with self.errors:
                self.reason = last_error(self.process, self.errors)
        return True

    def stop(self) -> None:
        """Send SIGTERM, at which a run saves and stops."""
        self.process.terminate()

    def wait(self) -> None:
        """Wait for the process."""
        self.process.wait()
        self.errors.close()


def to_json(config: RunConfig, execution: Execution) -> str:
    """Return what `work` reads."""
    return json.dumps({"config": config_to_dict(config), "execution": asdict(execution)}, default=str)


def from_json(text: str) -> tuple[RunConfig, Execution]:
    """Return what `to_json` was given."""
    data: dict[str, Any] = json.loads(text)
    execution = data["execution"]
    folders = {name: Path(execution[name]) for name in ("logs", "data_dir") if execution[name] is not None}
    return config_from_dict(data["config"]), Execution(**{**execution, **folders})


def work(text: str) -> NoReturn:
    """Run, leave the reason of a failure as the last line on standard error, and exit as `cao train` would."""
    from cao_lab.runs.session import run  # noqa: PLC0415  # torch is not for those who only write the JSON

    try:
        sys.exit(run(*from_json(text)).exit_code)
    except (ConfigError, ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(FAILED)


def cores() -> int:
    """Return how many cores this process may use."""
    # Not every system tells which cores are ours.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exit_of(number: int) -> int:
    """Return the exit code of a run that saved and stopped at a signal."""
    return 128 + number


if __name__ == "__main__":
    work(sys.stdin.read())

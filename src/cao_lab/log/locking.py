"""A lock that holds between machines: a file that exists, names its owner, and is touched as long as the owner lives.

It asks two things of a file system, which NFS guarantees too: of several processes that make a link of one name, one
succeeds, and a file that is opened shows the time at which it was last touched. Nothing is asked of `flock`, nor of the
clocks of the machines.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from cao_lab.log.records import LogError

BEAT_SECONDS = 10.0
# NFS may show the time of a file up to a minute late.
PATIENCE_SECONDS = 90.0
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Owner:
    """A process, told from all others: by its machine, its number there, its start, and a number drawn at random."""

    machine: str
    pid: int
    started: str
    token: str

    @classmethod
    def this_process(cls) -> "Owner":
        """Return this process as an owner that it has never been before."""
        return cls(machine(), os.getpid(), start_of(os.getpid()), uuid.uuid4().hex)

    @property
    def is_here(self) -> bool:
        """Whether its process numbers are ours, so that we can see whether it lives."""
        return self.machine == machine()

    @property
    def is_dead(self) -> bool:
        """Whether we can see that it has ended; its number may belong to another process by now."""
        return self == OLDER or (self.is_here and start_of(self.pid) != self.started)


OLDER = Owner("", 0, "", "older")
"""Stands for whoever left a file that names nobody, as older versions did."""


class Lock:
    """The lock of a folder. A process that was killed leaves it behind, and the next one takes it over."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self.owner = Owner.this_process()
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Take the lock."""
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self.release()

    def take(self) -> None:
        """Take the lock, or say who has it."""
        while not self._link():
            holder, touched = look(self.path)
            if holder is None:
                continue  # It was given back in the meantime.
            if holder.is_dead or self._is_silent(holder, touched):
                self._remove(self.path, holder)
            elif self.path.exists():
                raise self._refusal(holder)
        self._heart = threading.Thread(target=self._beat, args=(os.open(self.path, os.O_RDONLY),), daemon=True)
        self._heart.start()

    def release(self) -> None:
        """Give the lock back."""
        self._ended.set()
        if self._heart is not None:
            self._heart.join()
        if self.is_held:
            self.path.unlink()

    @property
    def is_held(self) -> bool:
        """Whether the lock is ours still: a process that was suspended for minutes may have lost it."""
        return look(self.path)[0] == self.owner

    def check(self) -> None:
        """Refuse to write where another process has taken over."""
        if not self.is_held:
            raise LogError(
                f"{self.path.parent} was taken over by another process, which found this one silent for "
                f"{PATIENCE_SECONDS:.0f} seconds; leave it to that one, or start the same command again"
            )

    def _link(self, path: Path | None = None) -> bool:
        """Link a whole file to a name, by default the lock's, which only one of several processes can."""
        path = path or self.path
        whole = self.path.with_name(f"run.{self.owner.token}.lock")
        whole.write_text(json.dumps(asdict(self.owner)))
        try:
            os.link(whole, path)
        except FileExistsError:
            # The answer of a server that made the link may have been lost, and the request repeated.
            return look(path)[0] == self.owner
        except OSError as error:
            reason = f"its file system makes no links, by which runs are locked ({error.strerror})"
            raise LogError(f"{self.path.parent}: {reason}; put --logs on another one") from error
        finally:
            whole.unlink()
        return True

    def _is_silent(self, holder: Owner, touched: float) -> bool:
        """Watch a lock of another machine until it is touched or released, or has not been for long."""
        if holder.is_here:
            return False
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            if look(self.path) != (holder, touched):
                return False
        return True

    def _remove(self, path: Path, holder: Owner) -> None:
        """Remove the file of an owner that is gone, and of no other.

        Between a look and a removal another process might remove it and put its own file there. So whoever removes a
        file of this owner first takes a claim to do so, which only one process can have.
        """
        claim = self.path.with_name(f"run.{holder.token}.gone.lock")
        if self._link(claim):
            if look(path)[0] == holder:
                path.unlink()
            claim.unlink()
        elif (claimant := look(claim)[0]) is not None and claimant.is_dead:
            self._remove(claim, claimant)

    def _beat(self, descriptor: int) -> None:
        """Touch our own file, and not whatever has its name, until the lock is given back."""
        with suppress(OSError):
            while not self._ended.wait(BEAT_SECONDS):
                os.utime(descriptor)
        os.close(descriptor)

    def _refusal(self, holder: Owner) -> LogError:
        where = f"process {holder.pid} on {holder.machine.partition(' ')[0]}"
        return LogError(f"another process is working on {self.path.parent} ({where}); wait for it or stop it")


def look(path: Path) -> tuple[Owner | None, float]:
    """Return who has a lock and when it was touched; nobody, if it is not there."""
    try:
        # Opening the file makes NFS ask the server.
        with path.open() as file:
            return Owner(**json.load(file)), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None, 0.0
    except (ValueError, TypeError):
        return OLDER, 0.0
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: the file was replaced while we read it.
            return None, 0.0
        raise


def machine() -> str:
    """Return what process numbers depend on: the host, its start, and the container."""
    return " ".join([socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _target("/proc/self/ns/pid")])


def start_of(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; nothing if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return "" if Path("/proc/self/stat").exists() else _is_there(pid)
    # A zombie has ended; only its parent has not asked for it yet.
    return "" if fields[0] in "ZX" else fields[19]


def _is_there(pid: int) -> str:
    """Say whether a process exists, where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "there"
    return "there"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""

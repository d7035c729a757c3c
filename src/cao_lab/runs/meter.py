"""Seconds and peak memory of training alone: what is done for the log's sake is left out."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cao_lab.log.records import MemorySource

MIB = 2**20


class Meter:
    """A clock that stands still, and a memory gauge that looks away, while `excluded`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._started_at: float | None = None
        self._peak = 0

    def start(self) -> None:
        """Let the clock run."""
        self._wait_for_device()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock and take note of the memory used since it was started."""
        if self._started_at is None:
            return
        self._wait_for_device()
        self.seconds += time.perf_counter() - self._started_at
        self._started_at = None
        if self.device.type == "cuda":
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do something that is not training, such as evaluation, monitoring or saving."""
        was_running = self._started_at is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    @property
    def peak_memory_mib(self) -> float:
        """Peak of the CUDA allocator during training, or of the whole process's resident set."""
        if self.device.type == "cuda":
            return self._peak / MIB
        return peak_resident_bytes() / MIB

    @property
    def peak_memory_source(self) -> MemorySource:
        """Where the peak comes from."""
        return "cuda" if self.device.type == "cuda" else "process"

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident set."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Unlike getrusage's figure, this one does not start from the peak of the parent process.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

"""The time that looks at the curvature take, as a share of all time, and how long the next one must wait."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """The time of looks, and all time since the first call: the processor's, or another device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.latest, self._looks, self._dearest, self._earlier = 0.0, 0.0, 0.0, 0.0
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """All time since the first call."""
        return self._earlier + (0.0 if self._began is None else self._now() - self._began)

    @property
    def share(self) -> float:
        """The time of looks as a share of all time."""
        return self._looks / self.elapsed if self.elapsed > 0 else 0.0

    def begin(self) -> None:
        """Begin to count, if that has not begun."""
        self._began = self._now() if self._began is None else self._began

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count the time inside as that of a look, which ends by reading a number from the device."""
        self.begin()
        started, events = self._now(), []
        if self.device.type == "cuda":  # The host may have run ahead, and wait inside for what was queued before.
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        yield
        self.latest = self._now() - started
        if events:
            events[1].record()
            events[1].synchronize()
            self.latest = events[0].elapsed_time(events[1]) / 1000
        self._looks += self.latest
        self._dearest = max(self._dearest, self.latest)

    def leave_out(self, seconds: float) -> None:
        """Take some time out of all time."""
        self._earlier -= seconds

    def wait(self, budget: float, steps: int) -> int:
        """Return the steps until a look as dear as any fits the budget; at most as many as there were, plus one."""
        owed = (self._looks + self._dearest) / budget - self.elapsed
        per_step = max((self.elapsed - self._looks) / steps, 1e-9)
        return 0 if owed <= 0 else min(math.ceil(owed / per_step), steps + 1)

    def state(self) -> dict[str, float]:
        """Return the times so far."""
        return {"elapsed": self.elapsed, "looks": self._looks, "dearest": self._dearest}

    def load(self, state: dict[str, float]) -> None:
        """Go on from times so far."""
        self._earlier, self._looks, self._dearest = state["elapsed"], state["looks"], state["dearest"]
        self._began = None

    def _now(self) -> float:
        """Return the time of this process, since others may share its processor; or that on the wall."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

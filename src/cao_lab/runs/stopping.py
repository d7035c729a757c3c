"""Being asked to stop: SIGTERM, SIGUSR2, SIGHUP and Ctrl-C are noted, and acted on when it does no harm."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """The signal that asked the run to stop, if one did."""

    signal: int = 0


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take note of SIGTERM, Ctrl-C, SIGUSR2 and SIGHUP instead of dying by them; a second one acts at once.

    SIGUSR2 is how Slurm announces the end of a job, to each of its processes; SIGHUP is a terminal that was closed,
    which is nothing to a run under nohup.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.signal = number
        signal.signal(number, before[signal.Signals(number)])

    heard = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The clock that solvers are compared by."""

from collections.abc import Callable
from time import perf_counter, process_time

import torch

Clock = Callable[[], float]


def computing_seconds() -> float:
    """Return seconds by a clock that stands still while other programs have the processor, where there is one.

    With one thread that is the processor's time, which equals that of a wall clock on an idle machine. Several threads
    each have their own, so there the wall clock has to do.
    """
    return process_time() if torch.get_num_threads() == 1 else perf_counter()

"""Time things side by side: interleaved, repeated, in an order that changes from round to round."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from tqdm import tqdm

from cao_lab.bench.rows import Estimate, estimate
from cao_lab.bench.task import device

Action: TypeAlias = Callable[[], object]
Case: TypeAlias = Callable[[], Action]
"""Prepares, off the clock, and returns what is to be timed."""
Times: TypeAlias = dict[str, list[float]]


def interleaved(cases: Mapping[str, Case], rounds: int, *, untimed: int = 1) -> Times:
    """Time every case once a round, after untimed rounds, and return the seconds of each.

    Neighbours in time see the same machine, so that ratios taken within a round forget its changes of pace.
    """
    names = list(cases)
    times: Times = {name: [] for name in names}
    for number in tqdm(range(untimed + rounds), desc=", ".join(names)[:40], leave=False, disable=None):
        gc.collect()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = seconds_of(cases[name]())
            if number >= untimed:
                times[name].append(seconds)
    return times


def always(action: Action) -> Case:
    """Return the case that needs no preparation."""
    return lambda: action


def seconds_of(action: Action) -> float:
    """Return the time an action takes, up to the end of what it started on a GPU."""
    wait_for_device()
    begin = time.perf_counter()
    action()
    wait_for_device()
    return time.perf_counter() - begin


def wait_for_device() -> None:
    """Wait until the GPU, if one is measured, has done all its work."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def ratio(times: Times, above: str, below: str) -> Estimate:
    """Estimate how many times longer one case takes than another, from the ratios within each round."""
    return estimate([a / b for a, b in zip(times[above], times[below], strict=True)])

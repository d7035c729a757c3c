"""Where the memory of a training step with a refresh goes: what is alive at the peak, by the line that allocated it.

    python scripts/trace_memory.py default-rules --width 16

Every allocation of torch is counted, by its profiler; memory of the interpreter and of oneDNN's own buffers is not.
"""

import sys
from collections import Counter
from typing import Any, NamedTuple

import tyro
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from cao_lab.bench.memory_case import MemoryCase, rehearse, train
from cao_lab.bench.task import random_task

MIB = 2**20


class Allocation(NamedTuple):
    """Memory that was taken, or with a negative size given back."""

    nanoseconds: int
    address: int
    size: int
    place: str


def place_of(event: Any) -> str:
    """Return the innermost line of the library, of the network or of the training that an event belongs to."""
    operation, lines = "", list[str]()
    while event is not None:
        if event.tag == _EventType.TorchOp and not operation:
            operation = event.name
        if event.tag == _EventType.PyCall:
            lines.append(event.name)
        event = event.parent
    ours = [line for line in lines if line.split("/src/")[-1].startswith(("cao/", "cao_lab/"))]
    inner = " < ".join(line.split("/src/")[-1] for line in ours[:2])
    layer = next((line for line in lines if "torch/nn/modules" in line and "__call" not in line), "")
    return f"{inner}  {layer.split('/')[-1]}  {operation}"


def allocations(case: MemoryCase, width: int, batch: int, parts: int) -> list[Allocation]:
    """Run a case under torch's profiler and return what it allocated, in order."""
    rehearse()
    task = random_task(width, batch, parts)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as seen:
        train(case, task)
    found, pending = [], list(seen.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, place_of(event.parent)))
    return sorted(found)


def main(
    case: MemoryCase = "default-rules", width: int = 16, batch: int = 128, parts: int = 4, lines: int = 25
) -> None:
    """Print what is alive at the peak.

    Args:
        case: What is trained, as in `cao bench`.
        width: Width of the ResNet.
        batch: Images per step.
        parts: Parts of the case "parts".
        lines: How many lines to print.
    """
    alive: dict[int, Allocation] = {}
    now = peak = 0
    at_peak: list[Allocation] = []
    for one in allocations(case, width, batch, parts):
        now += one.size
        if one.size > 0:
            alive[one.address] = one
        else:
            alive.pop(one.address, None)
        if now > peak:
            peak, at_peak = now, list(alive.values())
    places = Counter[str]()
    for one in at_peak:
        places[one.place] += one.size
    sys.stdout.write(
        f"{case}, width {width}, batch {batch}: {peak / MIB:.1f} MiB at the peak, beside model and batch\n"
    )
    for place, size in places.most_common(lines):
        sys.stdout.write(f"{size / MIB:8.1f}  {place}\n")


if __name__ == "__main__":
    tyro.cli(main)

"""The price of curvature in memory: a training step with a refresh against SGD's, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tqdm import tqdm

from cao_lab.bench.memory_case import MemoryCase
from cao_lab.bench.rows import Row, Rows, estimate
from cao_lab.bench.sizes import Sizes

MIB = 2**20
# Freed memory must go back at once, or the peak would be that of the allocator's habits.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
TARGETS: dict[MemoryCase, float | None] = {
    "gauss-newton": 1.10,
    "parts": 1.10,
    "hessian": None,
    "gauss-newton-after-forward": None,
    "default-rules": 1.10,
}
NOTES: dict[MemoryCase, str] = {
    "gauss-newton": "k = 1; refresh before the training forward",
    "parts": "k = 1; Hessian over {parts} parts of {part}, refresh before the training forward",
    "hessian": "k = 1; the one-liner refresh_if_due(loss), Hessian of the whole batch; the paper: 2.39",
    "gauss-newton-after-forward": "k = 1; refresh while the training forward's graph is alive",
    "default-rules": "CAO(params, lr), Gauss-Newton before the training forward, nothing sharp enough to be captured",
}


def memory_rows(sizes: Sizes) -> Rows:
    """Measure every kind of refresh at the usual width."""
    return width_rows(sizes, sizes.width, tuple(TARGETS), sizes.memory_rounds)


def wide_memory_rows(sizes: Sizes) -> Rows:
    """Measure the kinds that have a target, and the one-liner, at the second width."""
    cases: tuple[MemoryCase, ...] = ("gauss-newton", "parts", "hessian")
    return [] if sizes.wide is None else width_rows(sizes, sizes.wide, cases, 1)


def width_rows(sizes: Sizes, width: int, cases: Sequence[MemoryCase], rounds: int) -> Rows:
    """Run every case in its own process, as often as asked, and compare with SGD's."""
    everything: tuple[MemoryCase, ...] = ("bare", "sgd", *cases)
    peaks: dict[MemoryCase, list[int]] = {case: [] for case in everything}
    for _ in tqdm(range(rounds), desc=f"memory at width {width}", leave=False, disable=None):
        for case in everything:
            peaks[case].append(peak_bytes(case, width, sizes.batch, sizes.parts))
    suffix = "" if width == sizes.width else f"_width{width}"
    return [memory_row(peaks, case, sizes, suffix, width) for case in cases]


def memory_row(peaks: dict[MemoryCase, list[int]], case: MemoryCase, sizes: Sizes, suffix: str, width: int) -> Row:
    """Return (peak − bare) over (SGD's peak − bare)."""
    net = [peak - bare for peak, bare in zip(peaks[case], peaks["bare"], strict=True)]
    sgd = [peak - bare for peak, bare in zip(peaks["sgd"], peaks["bare"], strict=True)]
    ratios = estimate([above / below for above, below in zip(net, sgd, strict=True)])
    how = NOTES[case].format(parts=sizes.parts, part=sizes.batch // sizes.parts)
    note = (
        f"width {width}, batch {sizes.batch}; {how}; "
        f"{estimate(net).value / MIB:.0f} MiB against {estimate(sgd).value / MIB:.0f} MiB"
    )
    return ratios.row(f"memory_over_sgd_{case.replace('-', '_')}{suffix}", note, target=TARGETS[case])


def peak_bytes(case: MemoryCase, width: int, batch: int, parts: int) -> int:
    """Run one case in a new process and return the peak it tells."""
    arguments = json.dumps({"case": case, "width": width, "batch": batch, "parts": parts})
    command = [sys.executable, "-m", "cao_lab.bench.memory_case", arguments]
    child = subprocess.run(command, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"measuring the memory of {case} failed:\n{child.stderr[-2000:]}")
    return int(child.stdout.split()[-1])

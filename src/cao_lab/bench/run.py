"""All sections of `cao bench`, in order."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from cao_lab.bench.defaults import default_rows
from cao_lab.bench.epoch import epoch_rows
from cao_lab.bench.memory import memory_rows, wide_memory_rows
from cao_lab.bench.report import write_rows, write_summary
from cao_lab.bench.rows import Rows
from cao_lab.bench.sizes import FULL, QUICK, Sizes
from cao_lab.bench.step import step_rows
from cao_lab.bench.task import DEVICE
from cao_lab.runs.session import choose_device

# Memory comes first: the children then share the machine with a small parent.
SECTIONS: dict[str, Callable[[Sizes], Rows]] = {
    "memory": memory_rows,
    "memory, wide": wide_memory_rows,
    "step": step_rows,
    "epoch": epoch_rows,
    "default rules": default_rows,
}


def run_bench(out: Path, quick: bool, device: str = "auto") -> Rows:
    """Measure everything and write it to a folder; `quick` is smaller, shorter and not for the record."""
    choose_device(device)  # Or say that there is none.
    os.environ[DEVICE] = device
    title = "cao bench --quick: small sizes, not for the record" if quick else "cao bench"
    return measure(QUICK if quick else FULL, out, title)


def measure(sizes: Sizes, out: Path, title: str) -> Rows:
    """Go through the sections; the rows are on disk after each of them."""
    # A folder that cannot be written to shows at once, and not after minutes.
    out.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    for section in (bar := tqdm(SECTIONS, disable=None)):
        bar.set_description(section)
        if bar.disable:
            sys.stderr.write(f"measuring: {section}\n")
        rows += SECTIONS[section](sizes)
        write_rows(rows, out)
    write_summary(rows, out, title)
    return rows

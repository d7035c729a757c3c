"""The header of a log: what was run, with what, where and when."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cao_lab.log.records import FORMAT, Kind


def new_header(
    kind: Kind, place: tuple[str, str, str, int], facts: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the content of run.json as it stands before the first step: of any kind of run, at its place."""
    suite, task, label, seed = place
    return {
        "format": FORMAT,
        "kind": kind,
        "status": "running",
        "suite": suite,
        "task": task,
        "label": label,
        "seed": seed,
        **facts,
        **circumstances(device),
        "started_at": now(),
        "ended_at": None,
        "message": None,
    }


def circumstances(device: torch.device) -> dict[str, Any]:
    """Return with what a run is carried out; it may change where a run is resumed."""
    return {
        "versions": versions(),
        "git_commit": git_commit(),
        "device": device_name(device),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "arithmetic": arithmetic(),
    }


def settle_arithmetic() -> None:
    """Let a GPU compute in the precision that the run's config names, and choose its algorithms without racing them.

    Sums whose order a GPU does not fix remain, so that two runs differ by rounding; to forbid these takes algorithms
    that second derivatives do not have.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def arithmetic() -> dict[str, bool]:
    """Return the switches on which the last bits of a GPU depend."""
    return {
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cao": metadata.version("cao-optimizer"),
        "numpy": np.__version__,
    }


def git_commit() -> str | None:
    """Return the commit of the code that runs, marked if it was changed since; None outside a repository."""
    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    """Return what a git command says about the folder of the package's sources."""
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def device_name(device: torch.device) -> str:
    """Return `cpu` or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def now() -> str:
    """Return the time as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def processor_name() -> str:
    """Return the processor and the instructions torch uses on it, on which times and the last bits depend."""
    try:
        facts = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        facts = []
    names = [value.strip() for key, _, value in facts if key.strip() == "model name"]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"

"""Processes as torchrun starts them, but from a server that has imported torch, so that they start in no time."""

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cao_lab.config import Execution, RunConfig

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cao_lab.runs.session", "torch._dynamo", "torch.distributed", "sklearn.datasets"])


MOST_SECONDS = 60


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def work_as_rank(rank: int, ports: list[int], count: int, configs: Sequence[RunConfig], execution: Execution) -> None:
    """Do what a process of torchrun does, for one run after the other; its complaints go into a file."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
    os.environ.update({"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "test"})
    codes = []
    with open(f"{execution.logs}.rank{rank}", "w") as sys.stderr:
        faulthandler.dump_traceback_later(MOST_SECONDS - 5, file=sys.stderr)
        for config, port in zip(configs, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            codes.append(run_or_complain(config, execution))
        faulthandler.cancel_dump_traceback_later()
    sys.exit(max(codes))


def run_or_complain(config: RunConfig, execution: Execution) -> int:
    from cao_lab.runs.session import run  # noqa: PLC0415  # the server has imported it, and torch with it

    try:
        return run(config, execution).exit_code
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1


def start_ranks(configs: Sequence[RunConfig], logs: Path, count: int, **changes: object) -> list:
    """Start the processes that carry out runs together."""
    execution = Execution(logs=logs, threads=1, **changes)
    ports = [free_port() for _ in configs]
    arguments = (ports, count, configs, execution)
    ranks = [CONTEXT.Process(target=work_as_rank, args=(rank, *arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(configs: Sequence[RunConfig], logs: Path, count: int, **changes: object) -> list[int]:
    """Carry runs out and return the exit codes."""
    return ends(start_ranks(configs, logs, count, **changes))


def ends(ranks: list) -> list[int]:
    """Wait for processes and return their exit codes; one that hangs is killed, which shows in its code."""
    until = time.monotonic() + MOST_SECONDS
    for process in ranks:
        process.join(max(0.1, until - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def complaint(logs: Path, rank: int = 0) -> str:
    return Path(f"{logs}.rank{rank}").read_text()

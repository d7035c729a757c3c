"""Processes as torchrun starts them, but from a server that has imported torch, so that they start in no time."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

from cao_lab.config import Execution, RunConfig
from cao_lab.suites.launch import to_json, work

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cao_lab.runs.session", "torch._dynamo", "torch.distributed"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def work_as_rank(rank: int, count: int, port: int, text: str, errors: str) -> None:
    """Do what a process of torchrun does."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "test"})
    with open(f"{errors}{rank}", "w") as sys.stderr:
        work(text)


def start_ranks(config: RunConfig, execution: Execution, count: int, errors: Path) -> list:
    """Start the processes of one run; each leaves what it complains about in a file."""
    port = free_port()
    text = to_json(config, execution)
    ranks = [CONTEXT.Process(target=work_as_rank, args=(rank, count, port, text, str(errors))) for rank in range(count)]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(config: RunConfig, execution: Execution, count: int, errors: Path) -> list[int]:
    """Carry a run out and return the exit codes."""
    ranks = start_ranks(config, execution, count, errors)
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]

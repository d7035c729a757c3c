"""The process in which one memory figure is taken: run a few training steps and write the peak, in bytes."""

import json
import sys
from typing import Literal, TypeAlias

import torch

from cao import CAO
from cao_lab.bench.task import LR, BatchTask, Curvature, device, random_task
from cao_lab.runs.meter import peak_resident_bytes

MemoryCase: TypeAlias = Literal[
    "bare", "sgd", "gauss-newton", "parts", "hessian", "gauss-newton-after-forward", "default-rules",
]  # fmt: skip

STEPS = 2
"""The second step has what the first left behind: buffers, and the sketch it starts from."""


def peak_after(case: MemoryCase, width: int, batch: int, parts: int) -> int:
    """Train for two steps, with a refresh in each unless it is SGD, and return the peak memory in bytes.

    Before that, each process goes through the three kinds of step in miniature, so that all have loaded the same code.
    """
    rehearse()
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if case != "bare":
        train(case, random_task(width, batch, parts))
    return peak_memory_bytes()


def rehearse() -> None:
    """Run a plain step, forward mode and second derivatives at a size that takes next to no memory."""
    cases: tuple[MemoryCase, ...] = ("sgd", "gauss-newton", "hessian")
    for case in cases:
        # The smallest width that trains with the channels last, as the network that is measured does.
        train(case, random_task(width=8, batch=2, parts=1, side=8))


def train(case: MemoryCase, task: BatchTask) -> None:
    """Take the training steps of a case."""
    if case == "sgd":
        train_sgd(task)
    elif case == "gauss-newton":
        train_cao(rank_one(task), task, "gauss-newton", is_before_forward=True)
    elif case == "parts":
        train_cao(rank_one(task), task, "parts", is_before_forward=True)
    elif case == "hessian":
        train_cao(rank_one(task), task, "hessian", is_before_forward=False)
    elif case == "gauss-newton-after-forward":
        train_cao(rank_one(task), task, "gauss-newton", is_before_forward=False)
    elif case == "default-rules":
        train_cao(CAO(task.params, LR), task, "gauss-newton", is_before_forward=True)


def train_sgd(task: BatchTask) -> None:
    """Take plain SGD steps."""
    optimizer = torch.optim.SGD(task.params, LR)
    for _ in range(STEPS):
        task.gradient()
        optimizer.step()


def rank_one(task: BatchTask) -> CAO:
    """Return the smallest CAO that has a sketch."""
    return CAO(task.params, LR, rank=1, refresh_every=1, damping=0.1, power_iterations=1)


def train_cao(optimizer: CAO, task: BatchTask, curvature: Curvature, *, is_before_forward: bool) -> None:
    """Take CAO steps with a refresh in each, before the training forward or between forward and backward."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        if is_before_forward:
            optimizer.refresh(task.source(curvature))
        loss = task.loss() if curvature == "hessian" else task.training_loss()
        if not is_before_forward:
            optimizer.refresh(loss if curvature == "hessian" else task.source(curvature))
        loss.backward()
        # As in a training loop, the loss itself lives on; its graph is gone.
        optimizer.step()


def peak_memory_bytes() -> int:
    """Return the peak of the GPU's allocator, or of this process's resident set."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


if __name__ == "__main__":
    sys.stdout.write(f"{peak_after(**json.loads(sys.argv[1]))}\n")

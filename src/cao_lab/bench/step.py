"""The price of the optimizer's step alone: few large tensors, and many small ones."""

import torch
from torch import nn

from cao_lab.bench.rows import Row, Rows
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import LR, device, optimizer_with_sketch, seeded_resnet
from cao_lab.bench.timing import always, interleaved, ratio

SMALL = 100
"""Elements of a small tensor."""


def step_rows(sizes: Sizes) -> Rows:
    """Measure CAO's step between refreshes against SGD's."""
    shapes = [tuple(p.shape) for p in seeded_resnet(sizes.step_width, classes=10).parameters()]
    return [
        step_row("step_over_sgd_k1", shapes, sizes.optimizer_rounds, target=2.7, foreach=None),
        step_row(
            "step_over_sgd_k1_small_tensors",
            [(SMALL,)] * sizes.small_tensors,
            sizes.optimizer_rounds,
            target=3.0,
            foreach=True,
        ),
    ]


def step_row(name: str, shapes: list[tuple[int, ...]], rounds: int, *, target: float, foreach: bool | None) -> Row:
    """Time both steps on parameters of these shapes, each optimizer on its own."""
    ours, theirs = parameters(shapes), parameters(shapes)
    cao, sgd = optimizer_with_sketch(ours, rank=1), torch.optim.SGD(theirs, LR, foreach=foreach)
    times = interleaved({"cao": always(cao.step), "sgd": always(sgd.step)}, rounds)
    size = sum(p.numel() for p in ours)
    note = (
        f"{size:,} parameters in {len(shapes)} tensors, SGD {'foreach' if foreach else 'as torch chooses'}, "
        "no momentum; bytes moved: 6n against 3n, so 2.0 is the floor for large tensors"
    )
    return ratio(times, "cao", "sgd").row(name, note, target=target)


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    params = [nn.Parameter(torch.ones(shape, device=device())) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return params

"""The price of CAO's default rules: its first training steps, first sketch included, and the next ones, over SGD's."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import mean

import torch
from torch import nn
from torch.optim import Optimizer

from cao import CAO
from cao_lab.bench.rows import Estimate, Row, Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import BatchTask, device, seeded_resnet
from cao_lab.bench.timing import Action, Case, Times, interleaved
from cao_lab.tasks.data import Batch, Dataset, batches, load
from cao_lab.tasks.pickles import DataError

LR, MOMENTUM = 0.01, 0.9
"""The laboratory's SGD."""
MIXTURE_SAMPLES = 5_000
TARGETS = {"first": None, "later": 1.05}
CHUNK = 20
"""Steps that one optimizer takes before it is the other's turn."""


def default_rows(sizes: Sizes) -> Rows:
    """Train with both optimizers side by side, on the same batches, and time two stretches of equal length."""
    dataset = images()
    model = seeded_resnet(sizes.width, dataset.classes or 10).to(device())
    models = {"sgd": model, "cao": deepcopy(model)}
    sgd = torch.optim.SGD(models["sgd"].parameters(), LR, MOMENTUM)
    cao = CAO(models["cao"].parameters(), LR, momentum=MOMENTUM)
    cases = {
        name: training(models[name], optimizer, endless_batches(dataset, sizes.default_batch))
        for name, optimizer in (("sgd", sgd), ("cao", cao))
    }
    # What torch does once per process is nobody's price.
    BatchTask(deepcopy(model), *next(endless_batches(dataset, sizes.default_batch)), parts=1).loss().backward()
    return [default_row(stage, cases, cao, sizes) for stage in TARGETS]


def default_row(stage: str, cases: Mapping[str, Case], cao: CAO, sizes: Sizes) -> Row:
    """Time the next steps of both; what was spent on curvature is in the note."""
    before = cao.counters
    times = interleaved(cases, sizes.default_steps // CHUNK, untimed=0)
    now = cao.counters
    note = (
        f"CAO(params, {LR}, momentum={MOMENTUM}) with refresh_if_due(loss), width {sizes.width}, "
        f"batch {sizes.default_batch}, steps {before.steps + 1} to {now.steps}: "
        f"{now.refreshes - before.refreshes} refreshes, {now.looks - before.looks} looks, "
        f"{now.hessian_products - before.hessian_products} products; {cao.captured} directions captured at the end"
    )
    return mean_ratio(times).row(f"default_rules_time_over_sgd_{stage}", note, target=TARGETS[stage])


def mean_ratio(times: Times) -> Estimate:
    """Estimate the ratio by the mean of the chunks', not their median: a refresh falls into one chunk."""
    ratios = [cao / sgd for cao, sgd in zip(times["cao"], times["sgd"], strict=True)]
    return replace(estimate(ratios), value=mean(ratios))


def training(model: nn.Module, optimizer: Optimizer, supply: Iterator[Batch]) -> Case:
    """Return the next chunk of training, its batches made off the clock."""

    def prepared() -> Action:
        chunk = [next(supply) for _ in range(CHUNK)]
        return lambda: take_steps(model, optimizer, chunk)

    return prepared


def take_steps(model: nn.Module, optimizer: Optimizer, chunk: Sequence[Batch]) -> None:
    """Take one training step per batch, as the loop of the README does: the layout is torch's default for both."""
    for inputs, targets in chunk:
        loss = BatchTask(model, inputs, targets, parts=1).loss()
        optimizer.zero_grad()
        if isinstance(optimizer, CAO):
            optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()


def images() -> Dataset:
    """Return CIFAR if it is there, else a mixture of Gaussians of its shape."""
    for name in ("cifar100", "cifar10"):
        try:
            return load(name)
        except DataError:
            continue
    return gaussian_mixture(MIXTURE_SAMPLES)


def gaussian_mixture(samples: int, classes: int = 10) -> Dataset:
    """Return images that are the mean of their class, itself noise of low resolution, plus noise of every pixel."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(classes, 3, 8, 8, generator=generator)
    means = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    labels = torch.randint(classes, (samples,), generator=generator)
    noise = torch.randn(samples, 3, 32, 32, generator=generator)
    pixels = (128 + 20 * means[labels] + 50 * noise).clamp(0, 255).byte()
    centre, deviation = torch.full((3,), 128.0), torch.full((3,), 52.0)
    return Dataset(pixels, labels, pixels[:classes], labels[:classes], classes, centre, deviation, augment=True)


def endless_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield full training batches, epoch after epoch."""
    epoch = 0
    while True:
        for inputs, targets in batches(dataset, batch_size, seed=0, epoch=epoch):
            if len(inputs) == batch_size:
                yield inputs.to(device()), targets.to(device())
        epoch += 1

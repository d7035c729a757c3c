"""A network in the middle of its training, and the sketch that is some hundred steps old by then."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from tqdm import tqdm

from cao import Hessian, Lanczos
from cao.linalg.columns import HERE
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import Task, device, seeded_resnet
from cao_lab.tasks.data import Batch, Dataset, batches, load, prepare
from cao_lab.tasks.pickles import DataError

LR, MOMENTUM = 0.01, 0.9
"""The laboratory's SGD."""
MIXTURE_SAMPLES = 5_000
SKETCH_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Trained:
    """The task on a batch that training has not seen yet, more such batches, and the old sketch."""

    task: Task
    fresh: tuple[Batch, ...]
    old_vector: Tensor
    data: str
    """Which images these are."""

    def on_fresh_batches(self) -> Iterator[Task]:
        """Yield the task on each of the fresh batches."""
        for inputs, targets in self.fresh:
            yield replace(self.task, inputs=inputs, targets=targets)


@lru_cache(maxsize=1)
def trained(sizes: Sizes) -> Trained:
    """Train with SGD, take the top eigenvector of the Hessian on the way, and stop some hundred steps later."""
    data, dataset = images()
    dataset, fresh = without_the_last(dataset, sizes.fresh_batches, sizes.batch)
    model = seeded_resnet(sizes.width, dataset.classes or 10).to(device())
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    supply = endless_batches(dataset, sizes.batch)
    old_vector = torch.empty(0)
    for step in tqdm(range(sizes.burn_in + sizes.training_steps), desc="training", leave=False, disable=None):
        task = Task(model, *next(supply), sizes.parts)
        if step == sizes.burn_in:
            old_vector = top_vector(task, sizes.solver_products)
        task.gradient()
        optimizer.step()
    return Trained(Task(model, *fresh[0], sizes.parts), fresh, old_vector, data)


def top_vector(task: Task, products: int) -> Tensor:
    """Return the Hessian's top eigenvector, as one column."""
    hessian = Hessian(task.loss(), task.params)
    return Lanczos(products - 1, tolerance=SKETCH_TOLERANCE)(hessian, cold_start(task, 0)).vectors


def cold_start(task: Task, seed: int) -> Tensor:
    """Return a random column for the task's curvature."""
    size = sum(p.numel() for p in task.params)
    return HERE.random(size, 1, torch.Generator(device()).manual_seed(seed))


def images() -> tuple[str, Dataset]:
    """Return CIFAR if it is there, else a mixture of Gaussians of its shape, and its name."""
    for name in ("cifar100", "cifar10"):
        try:
            return name, load(name)
        except DataError:
            continue
    return "synthetic mixture of CIFAR's shape ($CAO_DATA has no CIFAR)", gaussian_mixture(MIXTURE_SAMPLES)


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


def without_the_last(dataset: Dataset, count: int, size: int) -> tuple[Dataset, tuple[Batch, ...]]:
    """Hold the last training samples back, and return the rest and these as batches."""
    kept = len(dataset.train_inputs) - count * size
    inputs = prepare(dataset, dataset.train_inputs[kept:]).to(device()).split(size)
    targets = dataset.train_targets[kept:].to(device()).split(size)
    rest = replace(dataset, train_inputs=dataset.train_inputs[:kept], train_targets=dataset.train_targets[:kept])
    return rest, tuple(zip(inputs, targets, strict=True))


def endless_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield full training batches, epoch after epoch."""
    epoch = 0
    while True:
        for inputs, targets in batches(dataset, batch_size, seed=0, epoch=epoch):
            if len(inputs) == batch_size:
                yield inputs.to(device()), targets.to(device())
        epoch += 1

"""Digits, CIFAR, two small tables and a text as tensors; crop and flip; a batch order that the seed alone decides."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from sklearn import datasets as sklearn_datasets
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import pad

from cao_lab.facts import DATASETS
from cao_lab.tasks import text
from cao_lab.tasks.cifar import CIFAR, read_cifar

PADDING = 4
HOLES = 2**15
"""In how many steps the place of a hole is drawn, before the side of the images is known."""
TEST_SHARE = 0.2
# Split and subset belong to the dataset, not to the run: they are the same for every seed.
FIXED_SEED = 0
# Streams of random numbers that must not repeat one another.
ORDER_STREAM, CURVATURE_STREAM, SUBSET_STREAM = range(3)

Batch = tuple[Tensor, Tensor]


class TaskError(ValueError):
    """A data set or a model that there is not, or that cannot be had in this size or together."""


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set in memory, images as uint8 in NCHW."""

    train_inputs: Shaped[Tensor, "n ..."]
    train_targets: Shaped[Tensor, "n ..."]
    test_inputs: Shaped[Tensor, "m ..."]
    test_targets: Shaped[Tensor, "m ..."]
    classes: int | None
    """Number of classes; None for regression."""
    mean: Float[Tensor, " channels"] | None
    """Mean of a channel (or feature) in the units of the inputs; None leaves the inputs as they are."""
    std: Float[Tensor, " channels"] | None
    """Standard deviation of a channel (or feature), as `mean`."""
    augment: bool
    """Whether training images are cropped and flipped by default."""

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the same dataset with its tensors on a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return Dataset(**{**values, **tensors})


@dataclass(frozen=True)
class Share:
    """One process's part of every batch, where several carry out a run together."""

    rank: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """Return its places in a batch; one that comes away empty borrows the first."""
        first, last = self._ends(size)
        return slice(first, last) if last > first else slice(0, 1)

    def weight(self, size: int) -> float:
        """Return what its mean loss counts, so that the mean over the processes is that over the batch."""
        first, last = self._ends(size)
        return (last - first) * self.count / size

    def _ends(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.count, (self.rank + 1) * size // self.count


WHOLE = Share()


def load(name: str, data_dir: Path | None = None, train_samples: int | None = None) -> Dataset:
    """Load a dataset by name, CIFAR from `data_dir` or else `$CAO_DATA`, the others from scikit-learn or Python.

    `train_samples` keeps a fixed, class-balanced part of the training set.
    """
    if name not in DATASETS:
        raise TaskError(f"dataset must be one of {', '.join(DATASETS)}, got {name}")
    dataset = READERS[name](data_dir)
    return dataset if train_samples is None else balanced_subset(dataset, train_samples)


def balanced_subset(dataset: Dataset, samples: int) -> Dataset:
    """Keep `samples` training samples, of every class as many as of any other, as far as the set has them."""
    size, least = len(dataset.train_targets), dataset.classes or 1
    if not least <= samples <= size:
        raise TaskError(f"train_samples must be from {least} to {size}, got {samples}")
    has_classes = dataset.classes is not None and dataset.train_targets.ndim == 1
    classes = dataset.train_targets.numpy() if has_classes else np.zeros(size, int)
    shuffled = torch.randperm(size, generator=_generator(SUBSET_STREAM, FIXED_SEED, 0)).numpy()
    # Taking the samples by their rank within their class deals them out class after class, round after round.
    order = np.lexsort((classes[shuffled], _rank_within_class(classes[shuffled])))
    kept = torch.from_numpy(np.sort(shuffled[order[:samples]]))
    return replace(dataset, train_inputs=dataset.train_inputs[kept], train_targets=dataset.train_targets[kept])


def batches(
    dataset: Dataset,
    batch_size: int | None,
    *,
    seed: int,
    epoch: int,
    augment: bool | None = None,
    is_heavy: bool = False,
    start: int = 0,
    share: Share = WHOLE,
) -> Iterator[Batch]:
    """Yield the training batches of an epoch from number `start` on, in an order drawn from (seed, epoch).

    Crops and flips are drawn from the same pair, so that no other consumer of random numbers, no device and
    no interruption changes what is seen. Without a batch size the whole set is one batch, in its own order.
    """
    inputs, targets = dataset.train_inputs, dataset.train_targets
    order, moves = _epoch_plan(len(inputs), batch_size is not None, _generator(ORDER_STREAM, seed, epoch))
    order, moves = order.to(inputs.device), moves.to(inputs.device)
    length = batch_size or len(inputs)
    for first in range(start * length, len(inputs), length):
        own = share.of(min(length, len(inputs) - first))
        chosen = order[first : first + length][own]
        batch = inputs[chosen]
        if dataset.augment if augment is None else augment:
            batch = crop_and_flip(batch, moves[first : first + length][own])
            batch = cut_out(batch, moves[first : first + length][own]) if is_heavy else batch
        yield prepare(dataset, batch), targets[chosen]


def _epoch_plan(size: int, is_shuffled: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the order of an epoch and (top, left, is mirrored, hole's row and column) for each of its images."""
    order = torch.randperm(size, generator=generator) if is_shuffled else torch.arange(size)
    corners = torch.randint(2 * PADDING + 1, (size, 2), generator=generator)
    mirrored = torch.randint(2, (size, 1), generator=generator)
    holes = torch.randint(HOLES, (size, 2), generator=generator)
    return order, torch.cat([corners, mirrored, holes], dim=1)


def crop_and_flip(
    images: UInt8[Tensor, "n channels height width"], moves: Int[Tensor, "n 5"]
) -> UInt8[Tensor, "n channels height width"]:
    """Pad with black and cut every image out at its own (top, left), mirrored where the third move is 1."""
    height, width = images.shape[2:]
    padded = pad(images, (PADDING,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    cropped = windows[torch.arange(len(images), device=images.device), :, moves[:, 0], moves[:, 1]]
    return torch.where(moves[:, 2].bool().view(-1, 1, 1, 1), cropped.flip(3), cropped)


def cut_out(
    images: UInt8[Tensor, "n channels height width"], moves: Int[Tensor, "n 5"]
) -> UInt8[Tensor, "n channels height width"]:
    """Blacken a square of half the side, around a place of its own in each image; at the border it is cut off."""

    def is_near(size: int, places: Int[Tensor, " n"]) -> Bool[Tensor, "n size"]:
        at = torch.arange(size, device=images.device) - (places * size // HOLES)[:, None]
        return (-(size // 4) <= at) & (at < size // 4)

    height, width = images.shape[2:]
    is_hole = is_near(height, moves[:, 3])[:, None, :, None] & is_near(width, moves[:, 4])[:, None, None, :]
    return torch.where(is_hole, 0, images)


def evaluation_batches(dataset: Dataset, batch_size: int | None, share: Share = WHOLE) -> Iterator[Batch]:
    """Yield the test set in order, without augmentation; several processes take whole batches in turn."""
    size = len(dataset.test_inputs)
    length = batch_size or size
    for first in range(0, size, length)[share.rank :: share.count]:
        chosen = slice(first, first + length)
        yield prepare(dataset, dataset.test_inputs[chosen]), dataset.test_targets[chosen]


def curvature_batch(dataset: Dataset, samples: int, *, seed: int, step: int, share: Share = WHOLE) -> Batch:
    """Draw training samples without augmentation, from (seed, step) alone."""
    size = len(dataset.train_inputs)
    if not 1 <= samples <= size:
        raise TaskError(f"samples must be from 1 to {size}, got {samples}")
    order = torch.randperm(size, generator=_generator(CURVATURE_STREAM, seed, step))
    chosen = order[:samples][share.of(samples)].to(dataset.train_inputs.device)
    return prepare(dataset, dataset.train_inputs[chosen]), dataset.train_targets[chosen]


def prepare(dataset: Dataset, inputs: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
    """Return inputs as a model takes them: float32, normalised by channel or feature."""
    if dataset.mean is None or dataset.std is None:
        return inputs.float()
    shape = (-1,) + (1,) * (inputs.ndim - 2)
    return (inputs.float() - dataset.mean.view(shape)) / dataset.std.view(shape)


def _generator(*entropy: int) -> torch.Generator:
    """Return a generator on the CPU, so that every device sees the same numbers."""
    # SeedSequence mixes its arguments: seed 0 epoch 1 and seed 1 epoch 0 have nothing in common.
    mixed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed))


def _rank_within_class(classes: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return for every sample how many samples of its class stand before it."""
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _digits(_: Path | None) -> Dataset:
    images, digits = sklearn_datasets.load_digits(return_X_y=True)
    mean, std = torch.tensor([4.884]), torch.tensor([6.017])
    return _split(images.reshape(-1, 1, 8, 8).astype(np.uint8), digits, classes=10, mean=mean, std=std)


def _breast_cancer(_: Path | None) -> Dataset:
    # The features keep their units, from 1e-3 to 4e3: an ill-conditioned problem as nature made it.
    features, diagnoses = sklearn_datasets.load_breast_cancer(return_X_y=True)
    return _split(features.astype(np.float32), diagnoses, classes=2)


def _diabetes(_: Path | None) -> Dataset:
    # scikit-learn ships centred columns of norm 1; divided by this std they have variance 1.
    features, progression = sklearn_datasets.load_diabetes(return_X_y=True)
    scaled = ((progression - progression.mean()) / progression.std()).astype(np.float32)[:, None]
    mean, std = torch.zeros(features.shape[1]), torch.full((features.shape[1],), len(features) ** -0.5)
    return _split(features.astype(np.float32), scaled, mean=mean, std=std)


def _split(
    inputs: Shaped[np.ndarray, "n ..."],
    targets: Shaped[np.ndarray, "n ..."],
    classes: int | None = None,
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Dataset:
    """Set a fixed fifth aside for testing, with every class in its share."""
    strata = None if classes is None else targets
    parts = train_test_split(inputs, targets, test_size=TEST_SHARE, stratify=strata, random_state=FIXED_SEED)
    train_inputs, test_inputs, train_targets, test_targets = map(torch.from_numpy, parts)
    return Dataset(train_inputs, train_targets, test_inputs, test_targets, classes, mean, std, augment=False)


def _text(_: Path | None) -> Dataset:
    """Cut each window of characters into what is seen and what comes next."""
    train, test = (torch.from_numpy(part) for part in text.windows())
    seen, coming = (slice(None), slice(-1)), (slice(None), slice(1, None))
    parts = (train[seen], train[coming].long(), test[seen], test[coming].long())
    return Dataset(*parts, classes=text.CLASSES, mean=None, std=None, augment=False)


def _cifar(name: str, data_dir: Path | None) -> Dataset:
    files = CIFAR[name]
    (train_images, train_labels), (test_images, test_labels) = read_cifar(name, data_dir)
    return Dataset(
        train_inputs=torch.from_numpy(train_images),
        train_targets=torch.from_numpy(train_labels),
        test_inputs=torch.from_numpy(test_images),
        test_targets=torch.from_numpy(test_labels),
        classes=files.classes,
        mean=torch.tensor(files.mean),
        std=torch.tensor(files.std),
        augment=True,
    )


READERS: Mapping[str, Callable[[Path | None], Dataset]] = {
    **{name: partial(_cifar, name) for name in CIFAR},
    "digits": _digits,
    "breast-cancer": _breast_cancer,
    "diabetes": _diabetes,
    "pydoc": _text,
}
"""How each dataset of `facts.DATASETS` is read, from a folder if it needs one."""

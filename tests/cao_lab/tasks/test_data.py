"""Datasets come as tensors, and what a run sees of them depends on its seed alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from small_cifar import write_small_cifar
from torch import Tensor

from cao_lab.tasks.data import (
    DATASETS,
    HOLES,
    Dataset,
    balanced_subset,
    batches,
    crop_and_flip,
    curvature_batch,
    cut_out,
    evaluation_batches,
    load,
    prepare,
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name in ("cifar10", "cifar100"):
        write_small_cifar(directory, name)
    return directory


@pytest.fixture(scope="module")
def cifar(data_dir: Path) -> Dataset:
    return load("cifar100", data_dir)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def numbered(size: int) -> Dataset:
    """Return a dataset whose targets are the positions of its samples."""
    inputs = torch.arange(size, dtype=torch.float32)[:, None]
    return Dataset(inputs, torch.arange(size), inputs, torch.arange(size), size, None, None, augment=False)


def targets_of(dataset: Dataset, batch_size: int | None, seed: int = 0, epoch: int = 0) -> list[int]:
    drawn = [targets for _, targets in batches(dataset, batch_size, seed=seed, epoch=epoch)]
    return [int(target) for target in torch.cat(drawn)]


@pytest.mark.parametrize(
    ("name", "train_shape", "test_size", "classes"),
    [
        ("digits", (1437, 1, 8, 8), 360, 10),
        ("breast-cancer", (455, 30), 114, 2),
        ("diabetes", (353, 10), 89, None),
        ("cifar10", (200, 3, 32, 32), 100, 10),
        ("cifar100", (200, 3, 32, 32), 100, 100),
    ],
)
def test_every_dataset_has_its_sizes(
    data_dir: Path, name: str, train_shape: tuple[int, ...], test_size: int, classes: int | None
) -> None:
    dataset = load(name, data_dir)
    assert dataset.train_inputs.shape == train_shape
    assert dataset.test_inputs.shape == (test_size, *train_shape[1:])
    assert dataset.classes == classes


def test_images_stay_bytes_and_targets_fit_their_loss(data_dir: Path) -> None:
    loaded = {name: load(name, data_dir) for name in DATASETS}
    assert {name for name in DATASETS if loaded[name].train_inputs.dtype == torch.uint8} == {
        "digits",
        "cifar10",
        "cifar100",
        "pydoc",
    }
    assert loaded["diabetes"].train_targets.shape == (353, 1)
    assert all(d.train_targets.dtype == torch.int64 for d in loaded.values() if d.classes is not None)


def test_an_unknown_dataset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"one of cifar10, cifar100, .* got mnist"):
        load("mnist")


def test_train_and_test_digits_are_the_whole_set_without_overlap(digits: Dataset) -> None:
    images, labels = load_digits(return_X_y=True)
    pairs = [(digits.train_inputs, digits.train_targets), (digits.test_inputs, digits.test_targets)]
    ours = [np.column_stack([inputs.flatten(1).numpy(), targets.numpy()]) for inputs, targets in pairs]
    expected = np.column_stack([images, labels])
    assert sorted(map(tuple, np.concatenate(ours).astype(int))) == sorted(map(tuple, expected.astype(int)))


def test_every_class_has_its_share_of_the_test_set(digits: Dataset) -> None:
    tested = digits.test_targets.bincount()
    whole = tested + digits.train_targets.bincount()
    assert ((tested - 0.2 * whole).abs() <= 1).all()


def test_loading_does_not_depend_on_the_global_random_state() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = load("digits", train_samples=100)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first.train_inputs, load("digits", train_samples=100).train_inputs)


def test_images_and_the_table_of_regression_are_normalised(digits: Dataset) -> None:
    for dataset in (digits, load("diabetes")):
        inputs = prepare(dataset, torch.cat([dataset.train_inputs, dataset.test_inputs]))
        assert inputs.dtype == torch.float32
        assert inputs.mean().abs() < 1e-3
        assert (inputs.std(correction=0) - 1).abs() < 1e-3


def test_cifar_is_normalised_by_channel(cifar: Dataset) -> None:
    means = torch.tensor([129.304, 124.070, 112.434])
    gray = means.view(3, 1, 1).expand(1, 3, 32, 32)
    assert prepare(cifar, gray).abs().max() < 1e-4
    assert torch.allclose(prepare(cifar, gray + 70)[0, :, 0, 0], 70 / torch.tensor([68.170, 65.392, 70.418]))


def test_breast_cancer_keeps_its_units() -> None:
    dataset = load("breast-cancer")
    inputs, _ = next(batches(dataset, None, seed=0, epoch=0))
    assert torch.equal(inputs, dataset.train_inputs)
    assert inputs.max() > 4000


def test_a_subset_has_every_class_equally_often(cifar: Dataset, digits: Dataset) -> None:
    assert balanced_subset(cifar, 100).train_targets.bincount().tolist() == [1] * 100
    counts = balanced_subset(digits, 237).train_targets.bincount()
    assert sorted(counts.tolist()) == [23] * 3 + [24] * 7


def test_a_subset_takes_what_there_is_of_a_rare_class() -> None:
    dataset = replace(numbered(10), train_targets=torch.tensor([0] * 2 + [1] * 8), classes=2)
    assert balanced_subset(dataset, 7).train_targets.tolist() == [0] * 2 + [1] * 5
    assert torch.equal(balanced_subset(dataset, 10).train_inputs, dataset.train_inputs)


def test_a_larger_subset_contains_the_smaller_one() -> None:
    dataset = replace(numbered(40), train_targets=torch.arange(40) % 4, classes=4)
    small, large = (set(balanced_subset(dataset, size).train_inputs.flatten().tolist()) for size in (8, 24))
    assert small < large


def test_a_subset_leaves_the_test_set_alone(digits: Dataset) -> None:
    assert torch.equal(load("digits", train_samples=50).test_inputs, digits.test_inputs)


@pytest.mark.parametrize(("name", "samples", "range_"), [("digits", 9, "10 to 1437"), ("digits", 1438, "10 to 1437")])
def test_an_impossible_subset_is_refused(name: str, samples: int, range_: str) -> None:
    with pytest.raises(ValueError, match=f"train_samples must be from {range_}, got {samples}"):
        load(name, train_samples=samples)


def test_an_epoch_shows_every_sample_once_and_keeps_the_incomplete_batch() -> None:
    sizes = [len(targets) for _, targets in batches(numbered(50_000), 128, seed=0, epoch=0)]
    assert sizes == [128] * 390 + [80]
    assert sorted(targets_of(numbered(1000), 128)) == list(range(1000))


def test_without_a_batch_size_the_set_is_one_batch_in_its_own_order() -> None:
    assert targets_of(numbered(50), None) == list(range(50))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(targets_of(numbered(50), 10, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_batches_ignore_and_spare_the_global_random_state(cifar: Dataset) -> None:
    torch.manual_seed(1)
    first = list(batches(cifar, 64, seed=3, epoch=2))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = list(batches(cifar, 64, seed=3, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_an_epoch_can_be_entered_in_the_middle(cifar: Dataset, start: int) -> None:
    whole = list(batches(cifar, 64, seed=3, epoch=2))
    rest = list(batches(cifar, 64, seed=3, epoch=2, start=start))
    assert len(rest) == 4 - start
    for expected, batch in zip(whole[start:], rest, strict=True):
        assert torch.equal(expected[0], batch[0])
        assert torch.equal(expected[1], batch[1])


def test_turning_augmentation_off_keeps_the_order(cifar: Dataset) -> None:
    plain = list(batches(cifar, 64, seed=0, epoch=0, augment=False))
    for (images, labels), (moved, moved_labels) in zip(plain, batches(cifar, 64, seed=0, epoch=0), strict=True):
        assert torch.equal(labels, moved_labels)
        assert not torch.equal(images, moved)


def test_a_hole_is_a_black_square_of_half_the_side_and_nothing_else_changes() -> None:
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    moves = torch.randint(HOLES, (64, 5))
    cut = cut_out(images, moves)
    for image, original, (*_, row, column) in zip(cut, images, moves.tolist(), strict=True):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        top, left = row * 32 // HOLES - 8, column * 32 // HOLES - 8
        inside[max(top, 0) : top + 16, max(left, 0) : left + 16] = True
        assert torch.equal(image, original * ~inside)


def test_heavy_augmentation_leaves_order_crops_and_flips_as_they_are() -> None:
    images = torch.randint(1, 256, (40, 3, 8, 8), dtype=torch.uint8)
    nothing = torch.zeros(40, dtype=torch.long)
    dataset = Dataset(images, nothing, images, nothing, 2, None, None, augment=True)
    usual, heavy = (
        torch.cat([one for one, _ in batches(dataset, 16, seed=1, epoch=2, is_heavy=is_heavy)])
        for is_heavy in (False, True)
    )
    is_kept = heavy > 0
    assert torch.equal(heavy[is_kept], usual[is_kept])
    assert 0.5 < is_kept.sum() / (usual > 0).sum() < 0.95


def test_crop_and_flip_move_every_image_as_told() -> None:
    images = torch.randint(1, 256, (3, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = crop_and_flip(images, torch.tensor([[4, 4, 0, 0, 0], [4, 4, 1, 0, 0], [1, 6, 0, 0, 0]]))
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1], images[1].flip(2))
    assert torch.equal(moved[2, :, 3:, :4], images[2, :, :3, 2:])
    assert moved[2, :, :3].sum() + moved[2, :, :, 4:].sum() == 0


def shifted_copies(image: np.ndarray) -> dict[bytes, tuple[int, int, bool]]:
    """Return every crop of an image padded by 4, mirrored or not, by plain slicing."""
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    crops = {(i, j): padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)}
    return {
        (crop[:, :, ::-1] if flip else crop).tobytes(): (*corner, flip)
        for corner, crop in crops.items()
        for flip in (False, True)
    }


def test_augmented_images_are_crops_of_the_padded_ones_in_all_ways_equally_often(cifar: Dataset) -> None:
    one = replace(cifar, train_inputs=cifar.train_inputs[:1].expand(4000, -1, -1, -1), train_targets=torch.zeros(4000))
    known = shifted_copies(one.train_inputs[0].numpy())
    drawn = next(batches(replace(one, mean=None, std=None), None, seed=0, epoch=0))[0].byte().numpy()
    moves = np.array([known[image.tobytes()] for image in drawn])
    counts = np.unique(moves, axis=0, return_counts=True)[1]
    assert len(counts) == 162
    assert ((counts - 4000 / 162) ** 2 / (4000 / 162)).sum() < 162 + 4 * np.sqrt(2 * 162)


def test_crops_differ_from_epoch_to_epoch(cifar: Dataset) -> None:
    first, second = (next(batches(cifar, None, seed=0, epoch=epoch))[0] for epoch in (0, 1))
    assert not torch.equal(first, second)


def test_digits_are_neither_cropped_nor_flipped(digits: Dataset) -> None:
    images, _ = next(batches(digits, None, seed=0, epoch=0))
    assert torch.allclose(images, (digits.train_inputs.float() - 4.884) / 6.017)


def test_evaluation_shows_the_test_set_in_order(cifar: Dataset) -> None:
    parts = list(evaluation_batches(cifar, 64))
    assert [len(labels) for _, labels in parts] == [64, 36]
    assert torch.equal(torch.cat([labels for _, labels in parts]), cifar.test_targets)
    assert torch.equal(torch.cat([images for images, _ in parts]), prepare(cifar, cifar.test_inputs))
    assert len(list(evaluation_batches(cifar, None))) == 1


def test_a_curvature_batch_depends_on_seed_and_step_alone() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        return [int(target) for target in curvature_batch(numbered(100), 20, seed=seed, step=step)[1]]

    torch.manual_seed(0)
    first = drawn(1, 2)
    torch.manual_seed(1)
    assert drawn(1, 2) == first
    assert len(set(first)) == 20
    assert first != drawn(2, 1) != drawn(1, 3)


def test_a_curvature_batch_is_normalised_and_not_augmented(cifar: Dataset) -> None:
    images, labels = curvature_batch(cifar, 200, seed=0, step=0)
    rows = {row.tobytes() for row in prepare(cifar, cifar.train_inputs).numpy()}
    assert {row.tobytes() for row in images.numpy()} == rows
    assert sorted(labels.tolist()) == sorted(cifar.train_targets.tolist())


@pytest.mark.parametrize("samples", [0, 101])
def test_an_impossible_curvature_batch_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples must be from 1 to 100, got {samples}"):
        curvature_batch(numbered(100), samples, seed=0, step=0)


def test_a_dataset_moves_all_its_tensors_and_nothing_else(cifar: Dataset) -> None:
    moved = cifar.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, Tensor)]
    assert len(tensors) == 6
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert (moved.classes, moved.augment) == (100, True)

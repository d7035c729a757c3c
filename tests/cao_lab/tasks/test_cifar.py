"""CIFAR files are read as the channels and rows they are, and every defect is reported with its remedy."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cifar import write_pickle, write_small_cifar

from cao_lab.tasks.cifar import read_cifar
from cao_lab.tasks.pickles import DataError


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    """Return the folder of a small CIFAR-100."""
    return write_small_cifar(tmp_path, "cifar100")


def change(path: Path, **changes: Any) -> None:
    write_pickle(path, {**pickle.loads(path.read_bytes()), **changes})


def test_pixels_are_planes_of_red_green_and_blue_in_rows(cifar100: Path) -> None:
    pixels = np.zeros((100, 3072), np.uint8)
    pixels[7, 1024 + 2 * 32 + 5] = 200
    change(cifar100 / "test", data=pixels)
    _, (images, _) = read_cifar("cifar100", cifar100.parent)
    assert images.shape == (100, 3, 32, 32)
    assert images[7, 1, 2, 5] == 200
    assert images.sum() == 200


def test_the_five_training_files_of_cifar10_are_joined_in_order(tmp_path: Path) -> None:
    folder = write_small_cifar(tmp_path, "cifar10")
    change(folder / "data_batch_3", labels=[9] * 40)
    (images, labels), (_, test_labels) = read_cifar("cifar10", tmp_path)
    assert images.shape == (200, 3, 32, 32)
    assert labels.tolist() == [*range(10)] * 8 + [9] * 40 + [*range(10)] * 8
    assert test_labels.tolist() == [*range(10)] * 10


def test_labels_may_be_an_array(cifar100: Path) -> None:
    change(cifar100 / "test", fine_labels=np.full(100, 5, np.uint8))
    assert read_cifar("cifar100", cifar100.parent)[1][1].tolist() == [5] * 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((100, 3071), np.uint8)}, "uint8 of shape (100, 3072), got uint8 of shape (100, 3071)"),
        ({"data": np.zeros((99, 3072), np.uint8)}, "uint8 of shape (100, 3072), got uint8 of shape (99, 3072)"),
        ({"data": np.zeros((100, 3072), "f4")}, "uint8 of shape (100, 3072), got float32 of shape (100, 3072)"),
        ({"data": [1, 2]}, "uint8 of shape (100, 3072), got a list"),
        ({"data": None}, "uint8 of shape (100, 3072), got nothing"),
        ({"fine_labels": [*range(99), 100]}, "whole numbers from 0 to 99, got 0 to 100"),
        ({"fine_labels": [*range(99), -1]}, "whole numbers from 0 to 99, got -1 to 98"),
        ({"fine_labels": [0.5] * 100}, "whole numbers from 0 to 99, got float64 of shape (100,)"),
        ({"fine_labels": [[1], [2, 3]]}, "whole numbers from 0 to 99, got a list"),
        ({"fine_labels": ["long" * 1000, "short"]}, "whole numbers from 0 to 99, got a list"),
        ({"fine_labels": [2**70] * 100}, "whole numbers from 0 to 99, got object of shape (100,)"),
        ({"fine_labels": None}, "whole numbers from 0 to 99, got nothing"),
        ({"fine_labels": [], "data": np.zeros((0, 3072), np.uint8)}, "got float64 of shape (0,)"),
    ],
)
def test_wrong_content_is_named_with_file_expectation_and_remedy(
    cifar100: Path, changes: dict[str, Any], message: str
) -> None:
    change(cifar100 / "test", **changes)
    remedy = f"; to get cifar100: cao data cifar100 --data-dir {cifar100.parent}"
    with pytest.raises(DataError, match=re.escape(message + remedy)) as caught:
        read_cifar("cifar100", cifar100.parent)
    assert str(caught.value).startswith(f"{cifar100 / 'test'}: ")


def test_a_truncated_file_is_named_with_the_remedy(cifar100: Path) -> None:
    path = cifar100 / "train"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"train cannot be read: .+; to get cifar100: cao data cifar100"):
        read_cifar("cifar100", cifar100.parent)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = write_small_cifar(tmp_path, "cifar10")
    (folder / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"data_batch_4 is missing; to get cifar10: cao data cifar10 --data-dir"):
        read_cifar("cifar10", tmp_path)


def test_the_environment_names_the_directory_when_the_caller_does_not(
    cifar100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAO_DATA", str(cifar100.parent))
    assert len(read_cifar("cifar100", None)[0][1]) == 200
    monkeypatch.delenv("CAO_DATA")
    with pytest.raises(DataError, match=r"cifar100 needs --data-dir DIR or \$CAO_DATA"):
        read_cifar("cifar100", None)

"""Read CIFAR-10 and CIFAR-100 from the official Python pickles, and say what is wrong with them if something is."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from cao_lab.tasks.pickles import DataError, read_pickle

ImagesAndLabels = tuple[UInt8[np.ndarray, "n 3 32 32"], Int64[np.ndarray, " n"]]


@dataclass(frozen=True)
class CifarFiles:
    """Where the official archive keeps a CIFAR set, and mean and deviation of its training pixels (0 to 255)."""

    folder: str
    train: tuple[str, ...]
    test: str
    labels: str
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


CIFAR = {
    "cifar10": CifarFiles(
        folder="cifar-10-batches-py",
        train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
        test="test_batch",
        labels="labels",
        classes=10,
        mean=(125.307, 122.950, 113.865),
        std=(62.993, 62.089, 66.705),
    ),
    "cifar100": CifarFiles(
        folder="cifar-100-python",
        train=("train",),
        test="test",
        labels="fine_labels",
        classes=100,
        mean=(129.304, 124.070, 112.434),
        std=(68.170, 65.392, 70.418),
    ),
}


def read_cifar(name: str, data_dir: Path | None) -> tuple[ImagesAndLabels, ImagesAndLabels]:
    """Return the training and the test set found under `data_dir`, or else `$CAO_DATA`."""
    directory, files = _data_directory(name, data_dir), CIFAR[name]
    try:
        return _joined(directory, files, files.train), _joined(directory, files, (files.test,))
    except DataError as error:
        raise DataError(f"{error}; to get {name}: cao data {name} --data-dir {directory}") from error


def _joined(directory: Path, files: CifarFiles, names: tuple[str, ...]) -> ImagesAndLabels:
    parts = [_images_and_labels(directory / files.folder / name, files) for name in names]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _data_directory(name: str, data_dir: Path | None) -> Path:
    directory = data_dir or os.environ.get("CAO_DATA")
    if not directory:
        raise DataError(f"{name} needs --data-dir DIR or $CAO_DATA; to get it: cao data {name} --data-dir DIR")
    return Path(directory)


def _images_and_labels(path: Path, files: CifarFiles) -> ImagesAndLabels:
    content = read_pickle(path)
    labels = _labels(content.get(files.labels), path, files)
    return _images(content.get("data"), path, len(labels)), labels


def _images(pixels: Any, path: Path, count: int) -> UInt8[np.ndarray, "n 3 32 32"]:
    expected = (count, 3 * 32 * 32)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != expected:
        raise DataError(f"{path}: data must be uint8 of shape {expected}, got {_description(pixels)}")
    return pixels.reshape(count, 3, 32, 32)


def _labels(values: Any, path: Path, files: CifarFiles) -> Int64[np.ndarray, " n"]:
    expected = f"{path}: {files.labels} must be whole numbers from 0 to {files.classes - 1}"
    # An array of texts would take as much memory for each as for the longest.
    if not isinstance(values, np.ndarray) and not _is_list_of_numbers(values):
        raise DataError(f"{expected}, got {_description(values)}")
    labels = np.asarray(values)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu":
        raise DataError(f"{expected}, got {_description(labels)}")
    if labels.min() < 0 or labels.max() >= files.classes:
        raise DataError(f"{expected}, got {labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float) for one in value)


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return "nothing" if value is None else f"a {type(value).__name__}"

"""Write a small set of random images in the layout of the official CIFAR archives."""

import pickle
from pathlib import Path

import numpy as np

PARTS = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "labels", 10),
    "cifar100": ("cifar-100-python", ["train"], "test", "fine_labels", 100),
}


def write_small_cifar(directory: Path, name: str, train: int = 200, test: int = 100) -> Path:
    """Write `train` and `test` images with their labels in turn from 0 to the last class; return the folder."""
    folder_name, train_files, test_file, key, classes = PARTS[name]
    folder = directory / folder_name
    folder.mkdir(parents=True)
    sizes = [(file, train // len(train_files)) for file in train_files] + [(test_file, test)]
    generator = np.random.default_rng(0)
    for file, size in sizes:
        pixels = generator.integers(0, 256, (size, 3072), dtype=np.uint8)
        write_pickle(folder / file, {"data": pixels, key: [i % classes for i in range(size)]})
    return folder


def write_pickle(path: Path, content: object) -> None:
    """Write a pickle whose bytes do not depend on the version of Python."""
    path.write_bytes(pickle.dumps(content, protocol=4))

"""Whatever an optimizer does with random numbers of its own, every optimizer sees the same bytes."""

import hashlib
import pickle

import numpy as np
import pytest

from cao_lab.config import RunConfig
from cao_lab.runs import training as training_module
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.runs.training import Training
from cao_lab.tasks.data import load

OPTIMIZERS = [
    SGDConfig(),
    AdamConfig(),
    CAOConfig(rank=0),
    CAOConfig(rank=1, refresh_every=2, power_iterations=1),
    CAOConfig(rank=3, refresh_every=3, power_iterations=1, sketch="random"),
]


def write_small_cifar(folder):
    """Write a CIFAR-100 of 60 training images in the official layout."""
    draw = np.random.default_rng(0)
    (folder / "cifar-100-python").mkdir()
    for name, size in (("train", 60), ("test", 20)):
        images = draw.integers(0, 256, (size, 3072), dtype=np.uint8)
        labels = draw.integers(0, 100, size).tolist()
        with (folder / "cifar-100-python" / name).open("wb") as file:
            pickle.dump({b"data": images, b"fine_labels": labels}, file)


def fingerprint(config, dataset, monkeypatch):
    """Train, and return a digest of every byte that reached the model in training."""
    digest = hashlib.sha256()
    original = training_module.BatchLoss

    def batch_loss(task, inputs, targets, *others):
        digest.update(inputs.numpy().tobytes() + targets.numpy().tobytes())
        return original(task, inputs, targets, *others)

    monkeypatch.setattr(training_module, "BatchLoss", batch_loss)
    list(Training(config, dataset).epochs())
    return digest.hexdigest()


@pytest.mark.parametrize("dataset", ["digits", "cifar100"])
def test_all_optimizers_see_the_same_bytes(dataset, tmp_path, monkeypatch):
    write_small_cifar(tmp_path)
    data = load(dataset, tmp_path, train_samples=160 if dataset == "digits" else None)
    model = "resnet18" if dataset == "cifar100" else "mlp"
    changes = {"dataset": dataset, "model": model, "width": 2, "epochs": 2, "batch_size": 32}
    digests = {fingerprint(RunConfig(optimizer, **changes), data, monkeypatch) for optimizer in OPTIMIZERS}
    assert len(digests) == 1
    assert fingerprint(RunConfig(SGDConfig(), seed=1, **changes), data, monkeypatch) not in digests

"""How far two trainings drift apart that differ by the last bit of one weight: the noise below every comparison.

`python scripts/rounding_noise.py [EPOCHS [SEEDS]]`, with CIFAR-100 in $CAO_DATA, on the task of suite `mini`.
"""

import sys

import torch

from cao_lab.config import RunConfig
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.training import Training
from cao_lab.suites.mini import CAO, small
from cao_lab.tasks.data import Dataset, load

METHODS: list[OptimizerConfig] = [SGDConfig(), SGDConfig(lr=0.1, momentum=0.0), CAO]


def losses(config: RunConfig, dataset: Dataset, *, is_nudged: bool) -> list[float]:
    """Return the train loss of each epoch, the first weight nudged to the next number or not."""
    training = Training(config, dataset)
    first = next(training.model.parameters()).data.view(-1)[:1]
    if is_nudged:
        first.copy_(first.nextafter(first + 1))
    return [record.train_loss for record in training.epochs()]


def main(epochs: int = 3, seeds: int = 2) -> None:
    """Print by how much the train losses of each epoch differ."""
    torch.set_num_threads(1)
    for seed in range(seeds):
        for optimizer in METHODS:
            config = small(optimizer, "cifar100", "resnet18", seed, epochs)
            dataset = load(config.dataset, train_samples=config.train_samples)
            plain, nudged = (losses(config, dataset, is_nudged=one) for one in (False, True))
            told = ", ".join(f"{abs(a - b):.4f}" for a, b in zip(plain, nudged, strict=True))
            sys.stdout.write(f"{config.label}, seed {seed}: {told}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""The paper's own protocol, all of it but the width: all 50,000 images, crop and flip, m = 400, its full budgets.

ResNet-18 of width 8 instead of 64. Every claim about speed can be judged at two values of η, each beside rank 0,
which is SGD at the matched rate α/η. The clip is c = 5/η, the same gradient norm for all. Seed by seed, so that a
comparison is complete early; the order is the order of importance.
"""

from dataclasses import replace

from cao_lab.config import RunConfig
from cao_lab.facts import DatasetName
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.suites.paper import SEEDS, at

EPOCHS = {"cifar100": 75, "cifar10": 50}

METHODS: list[OptimizerConfig] = [
    SGDConfig(),
    AdamConfig(),
    at(0.1),
    at(0.01),
    at(0.1, rank=0),
    at(0.01, rank=0),
    # Algorithm 1 as printed: with k = 0 the update is the gradient itself, at the rate α.
    replace(at(0.1, rank=0), scaling="unit"),
]
OTHER_RANKS: list[OptimizerConfig] = [at(0.1, rank=3), at(0.1, rank=5)]


def narrow(optimizers: list[OptimizerConfig], dataset: DatasetName, seed: int, width: int = 8) -> list[RunConfig]:
    """Return each optimizer at the paper's budget on one seed."""
    return [RunConfig(one, dataset, "resnet18", seed, EPOCHS[dataset], width=width) for one in optimizers]


NARROW = [
    *(run for seed in SEEDS for run in narrow(METHODS, "cifar100", seed)),
    *(run for seed in SEEDS for run in narrow(METHODS, "cifar10", seed)),
    *(run for seed in SEEDS for run in narrow(OTHER_RANKS, "cifar100", seed)),
    # Which way does the width pull?
    *narrow(METHODS, "cifar100", SEEDS[0], width=16),
]

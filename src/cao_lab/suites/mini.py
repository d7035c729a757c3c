"""The paper's question at a small machine's size: same data and protocol, less width, fewer samples, every control.

ResNet-18 of width 8 on 5,000 images of CIFAR-100, 50 a class: a step takes 0.13 s and a Hessian product 0.5 s of one
core, so that 20 epochs take SGD 3 minutes with the evaluation on all test images, and CAO of rank 1 5 minutes. One
refresh an epoch, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import replace

from cao_lab.config import RunConfig
from cao_lab.facts import PAPER_MODELS, DatasetName, ModelName
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig, AdamWConfig, SGDConfig
from cao_lab.suites.paper import (
    SEEDS,
    SMALLER,
    as_printed,
    at_other_dampings,
    matched_sgd,
    refreshes,
    sweep,
    with_controls,
)

WIDTH = 8
SAMPLES = 5000
STEPS_PER_EPOCH = 40
EPOCHS = 20

CAO = CAOConfig(rank=1, refresh_every=STEPS_PER_EPOCH)
# With momentum μ the update is 1/(1 − μ) times as long in the long run; the rate makes up for that.
CAO_WITH_MOMENTUM = replace(CAO, momentum=0.9, lr=CAO.lr / 10)


def small(optimizer: OptimizerConfig, dataset: DatasetName, model: ModelName, seed: int, epochs: int) -> RunConfig:
    """Return a run of the paper's protocol at the small size."""
    return RunConfig(optimizer, dataset, model, seed, epochs, width=WIDTH, train_samples=SAMPLES)


def with_momentum(damping: float) -> SGDConfig:
    """Return SGD with the paper's momentum at the rate that moves as far as CAO at a damping, in the long run."""
    return replace(SGDConfig(), lr=float(f"{(1 - SGDConfig().momentum) * CAO.lr / damping:.6g}"))


PRINTED = as_printed(CAO)
MAIN: list[OptimizerConfig] = [SGDConfig(), AdamConfig(), CAO]
ON_CIFAR100: list[OptimizerConfig] = [
    *MAIN,
    *with_controls(CAO),
    AdamWConfig(),
    CAO_WITH_MOMENTUM,
    replace(CAO, rank=3),
    replace(CAO, rank=5),
    *PRINTED,
]
OTHERS = [*(("cifar10", model) for model in PAPER_MODELS), ("cifar100", "resnet34")]
CONTROLS: list[OptimizerConfig] = [matched_sgd(CAO), replace(CAO, rank=0)]
AT_OTHER_DAMPINGS = at_other_dampings(CAO)
# Do the rates of the others decide? Adam a factor of 3 to either side, SGD with momentum at CAO's rates.
OTHER_RATES: list[OptimizerConfig] = [
    *(replace(AdamConfig(), lr=lr) for lr in (3e-4, 3e-3)),
    *(with_momentum(damping) for damping in SMALLER),
]
MORE_SEEDS = (3, 4, 5, 6, 7)
COMPARED: list[OptimizerConfig] = [
    *MAIN,
    *CONTROLS,
    replace(CAO, rank=0, scaling="unit"),
    *AT_OTHER_DAMPINGS,
    replace(CAO, rank=3),
    replace(CAO, rank=5),
]
"""What margins of 10 % and a point of accuracy ask more than three seeds of."""


def on_cifar100(optimizers: Sequence[OptimizerConfig], seeds: Sequence[int] = SEEDS) -> list[RunConfig]:
    """Return each optimizer on each seed of the main task, seed by seed."""
    return [small(optimizer, "cifar100", "resnet18", seed, EPOCHS) for seed in seeds for optimizer in optimizers]


MINI = [
    *on_cifar100(ON_CIFAR100),
    *(small(one, dataset, model, seed, EPOCHS) for seed in SEEDS for dataset, model in OTHERS for one in MAIN),
    # A comparison with Adam confirms nothing without a control, on any network.
    *(small(one, dataset, model, seed, EPOCHS) for seed in SEEDS for dataset, model in OTHERS for one in CONTROLS),
    *on_cifar100(AT_OTHER_DAMPINGS),
    *on_cifar100(OTHER_RATES),
    *on_cifar100(refreshes(STEPS_PER_EPOCH)),
    *on_cifar100(COMPARED, MORE_SEEDS),
]

# CAO's runs of version 0.1 once more: what has changing the optimizer since done to them? (SGD and Adam are torch's.)
MINI_AGAIN = on_cifar100([one for one in ON_CIFAR100 if isinstance(one, CAOConfig) and one not in PRINTED])

# The paper's sweep: η over two decades, m from half to twice an epoch. It speaks of variance, which takes seeds.
MINI_SENSITIVITY = on_cifar100(sweep(CAO, (STEPS_PER_EPOCH // 2, STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH)))

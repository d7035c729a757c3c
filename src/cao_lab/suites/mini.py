"""The paper's question at a small machine's size: same data and protocol, less width, fewer samples, every control.

ResNet-18 of width 8 on 5,000 images of CIFAR-100, 50 a class: a step takes 0.13 s and a Hessian product 0.5 s of one
core, so that 20 epochs take SGD 3 minutes with the evaluation on all test images, and CAO of rank 1 5 minutes. One
refresh an epoch, as in the paper.
"""

from dataclasses import replace

from cao_lab.config import RunConfig
from cao_lab.facts import PAPER_MODELS, DatasetName, ModelName
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig, AdamWConfig, SGDConfig
from cao_lab.suites.paper import SEEDS, sweep, with_controls

WIDTH = 8
SAMPLES = 5000
STEPS_PER_EPOCH = 40
EPOCHS = 20

CAO = CAOConfig(rank=1, refresh_every=STEPS_PER_EPOCH)
# With momentum μ the update is 1/(1 − μ) times as long in the long run; the rate makes up for that.
CAO_WITH_MOMENTUM = replace(CAO, momentum=0.9, lr=CAO.lr / 10)


# As the paper prints P, as its text has the eigensolver, and after the "brief SGD phase", of which an epoch is a guess.
AS_PRINTED: list[OptimizerConfig] = [
    replace(CAO, negative_curvature="signed"),
    replace(CAO, eigensolver="lanczos"),
    replace(CAO, warmup_steps=STEPS_PER_EPOCH),
]


def small(optimizer: OptimizerConfig, dataset: DatasetName, model: ModelName, seed: int, epochs: int) -> RunConfig:
    """Return a run of the paper's protocol at the small size."""
    return RunConfig(optimizer, dataset, model, seed, epochs, width=WIDTH, train_samples=SAMPLES)


ON_CIFAR100: list[OptimizerConfig] = [
    SGDConfig(),
    AdamConfig(),
    CAO,
    *with_controls(CAO),
    AdamWConfig(),
    CAO_WITH_MOMENTUM,
    replace(CAO, rank=3),
    replace(CAO, rank=5),
    *AS_PRINTED,
]
MAIN: list[OptimizerConfig] = [SGDConfig(), AdamConfig(), CAO]
OTHERS = [*(("cifar10", model) for model in PAPER_MODELS), ("cifar100", "resnet34")]

MINI = [
    *(small(optimizer, "cifar100", "resnet18", seed, EPOCHS) for seed in SEEDS for optimizer in ON_CIFAR100),
    *(small(one, dataset, model, seed, EPOCHS) for seed in SEEDS for dataset, model in OTHERS for one in MAIN),
]

# CAO's runs of version 0.1 once more: what has changing the optimizer since done to them? (SGD and Adam are torch's.)
MINI_AGAIN = [
    small(optimizer, "cifar100", "resnet18", seed, EPOCHS)
    for seed in SEEDS
    for optimizer in ON_CIFAR100
    if isinstance(optimizer, CAOConfig) and optimizer not in AS_PRINTED
]

# The paper's sweep: η over two decades, m from half to twice an epoch. It speaks of variance, which takes seeds.
MINI_SENSITIVITY = [
    small(one, "cifar100", "resnet18", seed, EPOCHS)
    for seed in SEEDS
    for one in sweep(CAO, (STEPS_PER_EPOCH // 2, STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH))
]

"""The runs of the paper with its budgets, the controls that it lacks, its sensitivity sweep, and a demonstration."""

from dataclasses import replace

from cao_lab.assumptions import BASE_LR, CLIP_UPDATE, DAMPING
from cao_lab.config import RunConfig
from cao_lab.facts import DatasetName, ModelName
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig

SEEDS = (0, 1, 2)

MATCHED_SGD = SGDConfig(lr=BASE_LR / DAMPING, momentum=0.0, max_gradient_norm=DAMPING * CLIP_UPDATE)
"""Rate α/η, momentum as CAO's, gradient clipped at ηc: the same iteration as rank 0 in the text's form."""


def with_controls(cao: CAOConfig) -> list[OptimizerConfig]:
    """Return what tells curvature from learning rate, for CAO of rank 1 given in its settings."""
    return [
        MATCHED_SGD,
        replace(cao, rank=0),
        replace(cao, rank=0, scaling="unit"),
        replace(cao, rank=1, sketch="random"),
        replace(cao, rank=1, sketch="projected-out"),
    ]


def runs(
    optimizers: list[OptimizerConfig], dataset: DatasetName, model: ModelName, epochs: int, seeds: tuple[int, ...]
) -> list[RunConfig]:
    """Return each optimizer on each seed, seed by seed, so that a comparison is complete early."""
    return [RunConfig(optimizer, dataset, model, seed, epochs) for seed in seeds for optimizer in optimizers]


MAIN: list[OptimizerConfig] = [SGDConfig(), AdamConfig(), CAOConfig(rank=1)]

PAPER = [
    *runs([*MAIN, CAOConfig(rank=3), CAOConfig(rank=5)], "cifar100", "resnet18", 75, SEEDS),
    *runs(with_controls(CAOConfig()), "cifar100", "resnet18", 75, SEEDS),
    *runs(MAIN, "cifar10", "resnet18", 50, SEEDS),
    *runs(MAIN, "cifar10", "resnet34", 50, SEEDS),
    *runs(MAIN, "cifar100", "resnet34", 75, seeds=(0,)),
]


def sweep(cao: CAOConfig, intervals: tuple[int, ...]) -> list[CAOConfig]:
    """Return the paper's sweep of η × m, and rank 0 at each η: the same rate and clip, and no curvature to damp."""
    damped = [replace(cao, damping=damping) for damping in (1e-3, 1e-2, 1e-1)]
    cells = [replace(one, refresh_every=interval) for one in damped for interval in intervals]
    return [*cells, *(replace(one, rank=0) for one in damped)]


SENSITIVITY = [RunConfig(one, "cifar100", "resnet18", epochs=75) for one in sweep(CAOConfig(), (200, 400, 800))]

DIGITS_STEPS_PER_EPOCH = 12
DIGITS_OPTIMIZERS: list[OptimizerConfig] = [
    SGDConfig(),
    AdamConfig(),
    *(CAOConfig(rank=rank, refresh_every=DIGITS_STEPS_PER_EPOCH) for rank in (0, 1, 5)),
]

DEMO = [RunConfig(optimizer, "digits", "mlp", seed, epochs=40) for seed in SEEDS for optimizer in DIGITS_OPTIMIZERS]

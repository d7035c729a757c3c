"""The runs of the paper with its budgets, the controls that it lacks, its sensitivity sweep, and a demonstration."""

from collections.abc import Sequence
from dataclasses import replace

from cao_lab.assumptions import CLIP_GRADIENT
from cao_lab.config import RunConfig
from cao_lab.facts import DatasetName, ModelName
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAOConfig, CAODefaultsConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig

SEEDS = (0, 1, 2)
STEPS_PER_EPOCH = 391
SMALLER = (0.01, 0.001)
"""The dampings of the paper's sweep below the assumed one."""


def at(damping: float, rank: int = 1, cao: CAOConfig = CAOConfig()) -> CAOConfig:  # noqa: B008  # frozen
    """Return the paper's method at a damping of its sweep, clipped at the same gradient norm whatever the damping."""
    return replace(cao, rank=rank, damping=damping, max_update_norm=CLIP_GRADIENT / damping)


def matched_sgd(cao: CAOConfig) -> SGDConfig:
    """Return SGD at rate α/η with CAO's momentum, its gradient clipped at ηc: the same iteration as rank 0."""
    clip = None if cao.max_update_norm is None else cao.damping * cao.max_update_norm
    return SGDConfig(lr=cao.lr / cao.damping, momentum=cao.momentum, max_gradient_norm=clip)


def with_controls(cao: CAOConfig) -> list[OptimizerConfig]:
    """Return what tells curvature from learning rate, for CAO of rank 1 given in its settings."""
    return [
        matched_sgd(cao),
        replace(cao, rank=0),
        replace(cao, rank=0, scaling="unit"),
        replace(cao, rank=1, sketch="random"),
        replace(cao, rank=1, sketch="projected-out"),
    ]


def as_printed(cao: CAOConfig) -> list[CAOConfig]:
    """Return CAO with P as the paper prints it, with its text's eigensolver, and after its "brief SGD phase".

    Of the phase's length an epoch is a guess.
    """
    return [
        replace(cao, negative_curvature="signed"),
        replace(cao, eigensolver="lanczos"),
        replace(cao, warmup_steps=min(cao.refresh_every, STEPS_PER_EPOCH)),
    ]


def at_other_dampings(cao: CAOConfig) -> list[OptimizerConfig]:
    """Return CAO, rank 0 and, as a second name of that, SGD at the smaller dampings of the paper's sweep."""
    return [
        one
        for damping in SMALLER
        for one in (at(damping, 1, cao), at(damping, 0, cao), matched_sgd(at(damping, 0, cao)))
    ]


def refreshes(every: int) -> list[OptimizerConfig]:
    """Return CAO with its rules, which refresh when the curvature has drifted, and the same at a fixed interval."""
    return [CAODefaultsConfig(), CAODefaultsConfig(refresh_every=every)]


def runs(
    optimizers: Sequence[OptimizerConfig], dataset: DatasetName, model: ModelName, epochs: int, seeds: tuple[int, ...]
) -> list[RunConfig]:
    """Return each optimizer on each seed, seed by seed, so that a comparison is complete early."""
    return [RunConfig(optimizer, dataset, model, seed, epochs) for seed in seeds for optimizer in optimizers]


CAO = CAOConfig(rank=1)
MAIN: list[OptimizerConfig] = [SGDConfig(), AdamConfig(), CAO]
CONTROLS: list[OptimizerConfig] = [matched_sgd(CAO), replace(CAO, rank=0)]
# Algorithm 1 counts steps from the start of each epoch, so that m = 400 of 391 steps is one refresh at its start.
COUNTED_BY_EPOCH = replace(CAO, refresh_every=STEPS_PER_EPOCH)

PAPER = [
    *runs([*MAIN, CAOConfig(rank=3), CAOConfig(rank=5)], "cifar100", "resnet18", 75, SEEDS),
    *runs(with_controls(CAO), "cifar100", "resnet18", 75, SEEDS),
    *runs(at_other_dampings(CAO), "cifar100", "resnet18", 75, SEEDS),
    *runs([*MAIN, *CONTROLS], "cifar10", "resnet18", 50, SEEDS),
    *runs([*MAIN, *CONTROLS], "cifar10", "resnet34", 50, SEEDS),
    *runs([*MAIN, *CONTROLS], "cifar100", "resnet34", 75, seeds=(0,)),
    *runs([*as_printed(CAO), COUNTED_BY_EPOCH, *refreshes(400)], "cifar100", "resnet18", 75, SEEDS),
    *(replace(run, augmentation="heavy") for run in runs(MAIN, "cifar100", "resnet18", 75, seeds=(0,))),
]


def sweep(cao: CAOConfig, intervals: tuple[int, ...]) -> list[CAOConfig]:
    """Return the paper's sweep of η × m, and rank 0 at each η: the same rate and clip, and no curvature to damp.

    And both without the clip, the paper's remedy for small η, at the ends of the sweep.
    """
    damped = [replace(cao, damping=damping) for damping in (1e-3, 1e-2, 1e-1)]
    cells = [replace(one, refresh_every=interval) for one in damped for interval in intervals]
    free = [replace(one, max_update_norm=None) for one in (damped[0], damped[-1])]
    return [*cells, *(replace(one, rank=0) for one in damped), *free, *(replace(one, rank=0) for one in free)]


SENSITIVITY = [RunConfig(one, "cifar100", "resnet18", epochs=75) for one in sweep(CAO, (200, 400, 800))]

DIGITS_STEPS_PER_EPOCH = 12
DIGITS_OPTIMIZERS: list[OptimizerConfig] = [
    SGDConfig(),
    AdamConfig(),
    *(CAOConfig(rank=rank, refresh_every=DIGITS_STEPS_PER_EPOCH) for rank in (0, 1, 5)),
]

DEMO = [RunConfig(optimizer, "digits", "mlp", seed, epochs=40) for seed in SEEDS for optimizer in DIGITS_OPTIMIZERS]

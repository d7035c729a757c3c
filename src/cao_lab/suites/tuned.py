"""Equal tuning budgets: every optimizer gets as many learning rates as any other, and fresh seeds at its best."""

import math
from collections.abc import Iterable
from dataclasses import replace

from cao_lab.assumptions import DAMPING
from cao_lab.config import RunConfig
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.protocol import TUNING_SEED
from cao_lab.runs.methods.cao import CAODefaultsConfig
from cao_lab.runs.methods.first_order import (
    AdaGradConfig,
    AdaHessianConfig,
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    RMSPropConfig,
    SGDConfig,
    ShampooConfig,
    SOAPConfig,
)
from cao_lab.suites.mini import CAO, CAO_WITH_MOMENTUM, EPOCHS, small
from cao_lab.suites.paper import DIGITS_STEPS_PER_EPOCH
from cao_lab.suites.rounds import FinishedRun, Rounds, together

RATES = 5
SPACING = math.sqrt(10)
EXTENSIONS = 2
FRESH_SEEDS = (1, 2, 3)
DIGITS_SEEDS = (1, 2, 3, 4, 5)
"""Margins of 10 % take five seeds, which digits can afford."""

# Centred on CAO's own effective rate, α/η: what it does without curvature.
PLAIN_SGD = replace(SGDConfig(), lr=CAO.lr / DAMPING, momentum=0.0)
TUNED: list[OptimizerConfig] = [
    SGDConfig(),
    PLAIN_SGD,
    AdamConfig(),
    AdamWConfig(),
    AdaHessianConfig(),
    SOAPConfig(),
    MuonConfig(),
    AdaGradConfig(),
    RMSPropConfig(),
    ShampooConfig(),
    CAO,
    CAO_WITH_MOMENTUM,
    CAODefaultsConfig(),
]


def mini_tuned() -> Rounds:
    """Tune each optimizer on CIFAR-100 at half the budget of `mini`; the middle of each grid is its default rate."""
    configs = [small(optimizer, "cifar100", "resnet18", TUNING_SEED, EPOCHS // 2) for optimizer in TUNED]
    yield from together(tune(config, FRESH_SEEDS) for config in configs)


def digits_tuned() -> Rounds:
    """Tune CAO of several ranks and dampings on digits, beside rank 0 at the same ones, SGD and Adam.

    Every method has the same effective rates to choose from, so that what damping does by its rate alone rank 0 does.
    """
    cao = replace(CAO, refresh_every=DIGITS_STEPS_PER_EPOCH)
    sketched = [
        replace(cao, rank=rank, damping=damping, lr=damping * PLAIN_SGD.lr)
        for damping in (0.1, 0.01)
        for rank in (0, 1, 5)
    ]
    methods: list[OptimizerConfig] = [SGDConfig(), PLAIN_SGD, AdamConfig(), *sketched]
    configs = [RunConfig(method, "digits", "mlp", TUNING_SEED, epochs=20) for method in methods]
    yield from together(tune(config, DIGITS_SEEDS) for config in configs)


def tune(config: RunConfig, fresh_seeds: Iterable[int]) -> Rounds:
    """Try five rates around the config's own, extend the grid while the best lies on its edge, and repeat the best.

    The best rate is the one with the lowest train loss in the last epoch. A grid is extended at most twice, by one
    rate each time.
    """
    middle = config.optimizer.lr
    rates = [middle * SPACING**power for power in range(-(RATES // 2), RATES // 2 + 1)]
    finished = yield [at_rate(config, rate) for rate in rates]
    for _ in range(EXTENSIONS):
        beyond = beyond_the_edge(finished)
        if beyond is None:
            break
        finished += yield [at_rate(config, beyond)]
    winner = best(finished)
    yield [replace(winner.config, seed=seed) for seed in fresh_seeds]


def at_rate(config: RunConfig, rate: float) -> RunConfig:
    """Return the run at another learning rate, rounded to three digits so that logs have readable names."""
    return replace(config, optimizer=replace(config.optimizer, lr=float(f"{rate:.3g}")))


def best(finished: list[FinishedRun]) -> FinishedRun:
    """Return the run with the lowest final train loss; of equal ones, such as all diverged, that of the lowest rate."""
    return min(finished, key=lambda run: (run.final_train_loss, run.config.optimizer.lr))


def beyond_the_edge(finished: list[FinishedRun]) -> float | None:
    """Return the next rate outside the grid if the best is the first or the last in it."""
    rates = sorted(run.config.optimizer.lr for run in finished)
    rate = best(finished).config.optimizer.lr
    if rate == rates[0]:
        return rate / SPACING
    return rate * SPACING if rate == rates[-1] else None

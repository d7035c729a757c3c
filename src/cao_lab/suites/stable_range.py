"""The largest effective learning rate α/η at which training still works: the paper's "widened range" as a number.

`protocol.outcome_of_rate` says whether a rate works. From a rate that
works, factors of four lead to the first that does not, and bisection in the logarithm narrows the gap: on digits to
9 %, less than the margin of the verdict, on CIFAR to 19 %. Neither momentum nor clipping nor weight decay takes part.
"""

import math
from dataclasses import replace

from cao_lab.assumptions import DAMPING
from cao_lab.config import RunConfig
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.suites.rounds import FinishedRun, Rounds, together

RANKS = (0, 1, 5, 10)
FIRST_RATE = 0.4
GROWTH = 4.0
LARGEST_RATE = 1e4
BISECTIONS = {"digits": 4, "cifar10": 3}

# Eleven eigenvalues, so that rank 10 and the first that it leaves out can be compared with 2/λ.
MONITORED = 11

SGD = SGDConfig(momentum=0.0, weight_decay=0.0, max_gradient_norm=None)
DIGITS = RunConfig(SGD, "digits", "mlp", epochs=20, monitor_curvature=MONITORED)
CIFAR = RunConfig(SGD, "cifar10", "resnet18", epochs=5, width=8, train_samples=2000, monitor_curvature=MONITORED)
STEPS_PER_EPOCH = {"digits": 12, "cifar10": 16}
SEEDS = {"digits": (0, 1, 2, 3, 4), "cifar10": (0,)}
"""A rate takes many runs; only digits are cheap enough for several seeds."""


def stable_range() -> Rounds:
    """Search for the largest rate of SGD and of CAO at each rank, on digits and on a small ResNet."""
    yield from together(
        largest_stable_rate(replace(task, optimizer=optimizer, seed=seed))
        for task in (DIGITS, CIFAR)
        for seed in SEEDS[task.dataset]
        for optimizer in optimizers(STEPS_PER_EPOCH[task.dataset])
    )


def optimizers(refresh_every: int) -> list[OptimizerConfig]:
    """Return SGD and CAO of each rank, the sketch refreshed once an epoch."""
    plain = CAOConfig(refresh_every=refresh_every, max_update_norm=None, weight_decay=0.0)
    return [SGD, *(replace(plain, rank=rank) for rank in RANKS)]


def largest_stable_rate(config: RunConfig) -> Rounds:
    """Grow the rate until a run fails (or shrink it until one works), then bisect between the two."""
    works = (yield [at_effective_rate(config, FIRST_RATE)])[0]
    stable, rate = is_stable(works), FIRST_RATE
    factor = GROWTH if stable else 1 / GROWTH
    while 1 / LARGEST_RATE < rate < LARGEST_RATE:
        rate *= factor
        probe = (yield [at_effective_rate(config, rate)])[0]
        if is_stable(probe) != stable:
            break
    else:
        return
    low, high = min(rate, rate / factor), max(rate, rate / factor)
    for _ in range(BISECTIONS[config.dataset]):
        middle = math.sqrt(low * high)
        probe = (yield [at_effective_rate(config, middle)])[0]
        low, high = (middle, high) if is_stable(probe) else (low, middle)


def at_effective_rate(config: RunConfig, rate: float) -> RunConfig:
    """Return the run whose complement moves at this rate: α for SGD, α/η for CAO."""
    alpha = rate * DAMPING if isinstance(config.optimizer, CAOConfig) else rate
    return replace(config, optimizer=replace(config.optimizer, lr=float(f"{alpha:.4g}")))


def is_stable(run: FinishedRun) -> bool:
    """Whether the run trained, and ended trained."""
    return run.outcome == "works"

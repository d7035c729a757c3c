"""How a suite learns from its runs: it yields a list of runs, and gets them back finished, in the same order."""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cao_lab.config import RunConfig
from cao_lab.log.records import EpochRecord
from cao_lab.protocol import RateOutcome, ends_above_start, outcome_of_rate


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over, for better or worse, and the rows of its epochs.csv."""

    config: RunConfig
    status: str
    epochs: Sequence[EpochRecord]

    @property
    def final_train_loss(self) -> float:
        """The last epoch's train loss; infinite for a run that diverged, failed, or ended in NaN or above its start."""
        if self.status != "finished" or not self.epochs or self.has_diverged:
            return math.inf
        loss = self.epochs[-1].train_loss
        return loss if math.isfinite(loss) else math.inf

    @property
    def losses(self) -> list[float]:
        """The train loss of each epoch."""
        return [one.train_loss for one in self.epochs]

    @property
    def has_diverged(self) -> bool:
        """Whether the loss ended above its start, or was not finite."""
        steps = self.epochs[0].step if self.epochs else None
        return self.status == "diverged" or ends_above_start(self.config.task, self.losses, steps)

    @property
    def outcome(self) -> RateOutcome:
        """What a search for stable rates makes of it."""
        return outcome_of_rate(self.config.task, self.losses, self.status != "finished")


Rounds: TypeAlias = Generator[list[RunConfig], list[FinishedRun], None]


def together(chains: Iterable[Rounds]) -> Rounds:
    """Run several chains of rounds side by side, so that there is always enough to do."""
    waiting = [(chain, configs) for chain in chains if (configs := next(chain, None)) is not None]
    while waiting:
        finished = yield [config for _, configs in waiting for config in configs]
        continued = []
        for chain, configs in waiting:
            own, finished = finished[: len(configs)], finished[len(configs) :]
            try:
                continued.append((chain, chain.send(own)))
            except StopIteration:
                continue
        waiting = continued

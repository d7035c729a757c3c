"""How a suite learns from its runs: it yields a list of runs, and gets them back finished, in the same order."""

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pandas import DataFrame

from cao_lab.config import RunConfig


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over, for better or worse, and the rows of its epochs.csv."""

    config: RunConfig
    status: str
    epochs: DataFrame

    @property
    def final_train_loss(self) -> float:
        """The last epoch's train loss; infinite for a run that diverged, failed or ended in NaN."""
        if self.status != "finished" or self.epochs.empty:
            return math.inf
        loss = float(self.epochs["train_loss"].iloc[-1])
        return loss if math.isfinite(loss) else math.inf

    @property
    def lowest_train_loss(self) -> float:
        """The lowest train loss of any epoch, whatever came after."""
        return math.inf if self.epochs.empty else float(self.epochs["train_loss"].min())


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

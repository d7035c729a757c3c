"""What of CAO's default rules is needed? Each piece taken away in turn, beside SGD with a clipped gradient.

    python scripts/ablation.py run --logs logs/ablation [--data-dir DATA]     # resumable; about an hour on one core
    python scripts/ablation.py table --logs logs/ablation

The problems, rates and measures are those of the suite robust, on seeds that nothing was designed on. The rule was
fixed before the runs: a piece stays if without it, over all problems,

- at least three more runs diverge, or
- at least two fewer rates work (final loss, mean over the seeds, within 10 % of plain SGD's best), or
- the final loss at SGD's best rate is at least 5 % higher (geometric mean over the problems),

and goes otherwise. The rules as a whole are held against the best of three clipping norms in the same way.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from cao import CAO, AtTheEdge, OnDrift
from cao.rules.refresh import Look, Seen, Track
from cao_lab.log.header import read_sweeps
from cao_lab.log.records import Sweep
from cao_lab.reporting.robust import Rate, rates_of
from cao_lab.sweeps import sweep
from cao_lab.sweeps.problems import PROBLEMS
from cao_lab.sweeps.sweep import SGD_RATES, Sketched, Swept, carry_out

SEEDS = (11, 12, 13)
MORE_DIVERGED, FEWER_RATES, HIGHER_LOSS, WITHIN = 3, 2, 1.05, 1.10


class Clipped(SGD):
    """SGD whose gradient is clipped at a norm."""

    def __init__(self, params: list[Tensor], lr: float, norm: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.norm = norm

    def step(self, closure: Any = None) -> Any:
        """Clip, and step."""
        clip_grad_norm_(self.param_groups[0]["params"], self.norm)
        return super().step(closure)


class WithoutSpread(OnDrift):
    """The drift rule, which does not learn how much the curvature varies from batch to batch."""

    def _learnt(self, seen: Seen, found: Look) -> Seen:
        return replace(super()._learnt(seen, found), spread=0.0)


class WithoutCredit(OnDrift):
    """The drift rule, whose budget is binding from the first step on."""

    def is_due(self, state: Any, track: Track) -> bool:
        """Ask as ever, but for the credit."""
        return self._unpaid(Seen.of(state), track) <= 0 and super().is_due(state, track)


def ours(**settings: Any) -> Swept:
    """Return CAO with its defaults but for some settings."""
    return Sketched(lambda params, lr: CAO(params, lr, momentum=0.9, **settings), SGD_RATES)


def clipped(norm: float) -> Swept:
    """Return SGD with a clipped gradient."""
    return Swept(lambda params, lr: Clipped(params, lr, norm), SGD_RATES)


def plain(params: list[Tensor], lr: float) -> Optimizer:
    """Return SGD with momentum."""
    return SGD(params, lr, momentum=0.9)


ARMS: Mapping[str, Swept] = {
    "sgd": Swept(plain, SGD_RATES),
    "sgd-clip0.1": clipped(0.1),
    "sgd-clip1": clipped(1.0),
    "sgd-clip10": clipped(10.0),
    "cao": ours(),
    "without-brake": ours(damping=AtTheEdge(safety=1e12)),
    "without-looks": ours(refresh_every=100),
    "without-alarm": ours(refresh_every=OnDrift(alarm=math.inf)),
    "without-spread": ours(refresh_every=WithoutSpread()),
    "without-credit": ours(refresh_every=WithoutCredit()),
    "one-budget": ours(refresh_every=OnDrift(exact_budget=OnDrift.budget)),
    "rank-1": ours(rank=1),
}


def run(folder: Path, data: Path | None) -> None:
    """Carry out what the log does not have yet, seed by seed, the longest problem last."""
    torch.set_num_threads(1)
    sweep.METHODS = ARMS
    for seed in SEEDS:
        for problem in PROBLEMS:
            for _ in carry_out(problem, seed, folder, data):
                pass
            sys.stdout.write(f"{problem.name} seed {seed}\n")
            sys.stdout.flush()


def summary(sweeps: Sequence[Sweep]) -> dict[str, tuple[int, int, float, float]]:
    """Return, by arm: diverged runs, rates that work, loss at SGD's best rate, and seconds, each against SGD's."""
    found: dict[str, list[tuple[int, int, float, float]]] = {arm: [] for arm in ARMS}
    for problem in dict.fromkeys(each.task for each in sweeps):
        own = [each for each in sweeps if each.task == problem]
        best = min(rates_of(own, "sgd"), key=lambda rate: rate.final)
        for arm in ARMS:
            rates = rates_of(own, arm)
            at_best = next(rate for rate in rates if rate.lr == best.lr)
            working = sum(rate.final <= WITHIN * best.final for rate in rates)
            found[arm].append((diverged(rates), working, at_best.final / best.final, at_best.seconds / best.seconds))
    return {
        arm: (
            sum(row[0] for row in rows),
            sum(row[1] for row in rows),
            math.exp(fmean(math.log(row[2]) for row in rows)),
            math.exp(fmean(math.log(row[3]) for row in rows)),
        )
        for arm, rows in found.items()
    }


def diverged(rates: Sequence[Rate]) -> int:
    """Count the runs that ended above their start."""
    return sum(rate.diverged for rate in rates)


def is_needed(whole: tuple[int, int, float, float], without: tuple[int, int, float, float]) -> bool:
    """Whether taking a piece away makes things worse, by the rule above."""
    return (
        without[0] - whole[0] >= MORE_DIVERGED
        or whole[1] - without[1] >= FEWER_RATES
        or without[2] >= HIGHER_LOSS * whole[2]
    )


def table(folder: Path) -> None:
    """Print the arms as a table of Markdown, and what follows for each."""
    missing: list[str] = []
    sweeps = read_sweeps(folder, missing)
    rows = summary(sweeps)
    sys.stdout.write(
        "| arm | diverged | rates that work | loss at SGD's best rate | time | needed |\n|---|---|---|---|---|---|\n"
    )
    for arm, row in rows.items():
        verdict = "" if arm == "cao" else ("yes" if is_needed(rows["cao"], row) else "no")
        sys.stdout.write(f"| {arm} | {row[0]} | {row[1]} | {row[2]:.3f} | {row[3]:.2f} | {verdict} |\n")
    sys.stdout.write(f"{len(sweeps)} sweeps; {'; '.join(missing)}\n")


def main() -> None:
    """Run, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--logs", type=Path, default=Path("logs/ablation"))
    parser.add_argument("--data-dir", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "run":
        run(chosen.logs, chosen.data_dir)
    else:
        table(chosen.logs)


if __name__ == "__main__":
    main()

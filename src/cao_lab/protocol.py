"""What is fixed before the runs it judges: thresholds, margins, prices, and which run plays which part.

What was changed later is told in docs/notebook.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from pandas import DataFrame, Series

from cao_lab.assumptions import ADAM_LR, CLIP_GRADIENT, DAMPING
from cao_lab.facts import SEARCHING, SUITES, Thresholds, dataset_of, kind_of, suites_of

CONFIDENCE = 0.95
ACCURACY_MARGIN = 0.01
"""Two accuracies are equal when the interval of their difference lies within ± one point."""
RATIO_MARGIN = 1.10
"""Two durations are equal when the interval of their ratio lies within ± 10 %: from 1/1.1 to 1.1."""
LARGEST_RISK = 0.10
"""Runs do not diverge when with confidence no more than this share of them does."""
EARLY_SHARE = 0.4
"""The early window is the first 40 % of the budget: epochs 0 to 30 of 75 in the paper."""

TUNING_SEED = 0
"""The seed by which a rate is tuned; where fresh seeds follow, it is left out, for it flatters the chosen."""

CHANCE_SHARES = Thresholds(0.75, (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))
"""For tasks below the paper's size, as shares of the loss of guessing, ln(classes)."""
STABLE_SHARE = 0.85
"""A rate works if the last train losses lie below this share of ln(classes), and none went above the start."""
LAST_SHARE = 0.25
"""The last losses of a run are those of the last quarter of its budget."""
START_MARGIN = 1.10
"""A loss is above the start if it is more than 10 % above: a run that learns nothing stays where it began."""
PAPER_INTERVAL = 400
"""The paper's refresh interval m, to which the cost of an epoch is normalised."""


def declared_thresholds(task: str) -> Thresholds | None:
    """Return the thresholds of a task from its name alone, so that no outcome can move them.

    CIFAR at the paper's size has the paper's 0.75 and its range from 0.6 to 1.0, and so has CIFAR-10 at less width on
    all images; a narrow network may not get there on CIFAR-100, where it has 2.0 and a range that includes the paper's.
    Where samples are fewer, 0.75 nats may be out of reach for everyone, and the threshold is three quarters of
    ln(classes): a quarter of the loss of guessing is gone. Digits have 0.1. Other tasks have none.
    """
    dataset, model = dataset_of(task)
    if dataset is None or dataset.thresholds is None or not model or model.startswith("autoencoder"):
        return None
    if dataset.models is None or model in dataset.models:
        return dataset.thresholds
    base, _, width = model.partition("w")
    if base in dataset.models and width.isdigit():
        return dataset.narrow
    return scaled(CHANCE_SHARES, math.log(dataset.classes or 1))


def scaled(shares: Thresholds, unit: float, offset: float = 0.0) -> Thresholds:
    """Return thresholds given as shares of a unit above an offset, rounded to what a table shows."""

    def loss(share: float) -> float:
        return float(f"{offset + share * unit:.4g}") if offset == 0 else offset + share * unit

    return Thresholds(loss(shares.primary), tuple(loss(share) for share in shares.sweep))


def distance_thresholds(epochs: DataFrame, shares: Thresholds) -> Thresholds:
    """Return losses at declared shares of the way from the start (1) to the lowest loss of any run (0).

    The lowest loss stands for the optimum; whoever reached it, the bar is the same for all.
    """
    losses = epochs["train_loss"].replace([np.inf, -np.inf], np.nan).dropna()
    start = epochs.loc[epochs["epoch"] == 1, "train_loss"].median()
    return scaled(shares, float(start - losses.min()), float(losses.min()))


def thresholds_of(suite: str, task: str, epochs: DataFrame) -> Thresholds | None:
    """Return the declared thresholds of a task within a suite."""
    shares = SUITES[suite].thresholds if suite in SUITES else None
    return declared_thresholds(task) if shares is None or epochs.empty else distance_thresholds(epochs, shares)


def start_loss(task: str, losses: Sequence[float], steps_per_epoch: float | None) -> float:
    """Return the loss before the first step: that of guessing, or what the log of a full batch begins with.

    The first row of a run on mini-batches is a mean over its first epoch, which a run at too large a rate has spent
    far above the start.
    """
    dataset, model = dataset_of(task)
    is_guess_known = dataset is not None and dataset.classes is not None and not model.startswith("autoencoder")
    if steps_per_epoch != 1 and is_guess_known:
        assert dataset is not None
        return math.log(dataset.classes or 1)
    return losses[0] if len(losses) else math.nan


def ends_above_start(task: str, losses: Sequence[float], steps_per_epoch: float | None) -> bool:
    """Say whether a run's last loss lies above its start, which is divergence though it may be finite."""
    return len(losses) > 0 and losses[-1] > START_MARGIN * start_loss(task, losses, steps_per_epoch)


RateOutcome: TypeAlias = Literal["works", "unstable", "slow"]


def outcome_of_rate(task: str, losses: Sequence[float], has_diverged: bool) -> RateOutcome:
    """Say what became of a run of a search for stable rates.

    It works if all losses of the last quarter of its epochs lie below the declared share of ln(classes) and none
    of any epoch above the start; it is unstable if it diverged or one did; else it was too slow for the budget, or
    its loss stood still, and nothing is known of its stability.
    """
    start = start_loss(task, losses, None)
    if has_diverged or not len(losses) or not max(losses) <= START_MARGIN * start:
        return "unstable"
    last = losses[-math.ceil(LAST_SHARE * len(losses)) :]
    return "works" if max(last) < STABLE_SHARE * start else "slow"


def without_tuning(rows: DataFrame) -> DataFrame:
    """Return runs, or their epochs, without the tuned suites' runs by which a rate was chosen before fresh seeds."""
    seeds = rows.groupby(["suite", "task", "label"])["seed"].transform("nunique")
    was_choosing = rows["suite"].isin(suites_of(["tuned"])) & (rows["seed"] == TUNING_SEED) & (seeds > 1)
    return rows[~was_choosing]


def fresh(rows: DataFrame, suite: str) -> DataFrame:
    """Return the rows of fresh seeds alone where rates were tuned and there are any; else all."""
    own = rows[rows["seed"] != TUNING_SEED]
    return own if kind_of(suite) == "tuned" and len(own) else rows


@dataclass(frozen=True)
class Arm:
    """A damping and a clip at which CAO was run: the paper has a sweep of η and no value, so each is judged."""

    damping: float
    clip: float
    """c; infinite without one, NaN in logs that do not say."""

    @property
    def name(self) -> str:
        """What to call it: the clip is named where it is not that of SGD's gradient norm, c = 5/η."""
        if math.isnan(self.clip) or math.isclose(self.clip, CLIP_GRADIENT / self.damping):
            return f"η = {self.damping:g}"
        return f"η = {self.damping:g}, " + (f"c = {self.clip:g}" if math.isfinite(self.clip) else "no clip")

    def has(self, runs: DataFrame) -> Series:
        """Say of each run of CAO whether it belongs here."""
        is_own: Series = is_close(runs["clip"], self.clip) & np.isclose(runs["damping"].astype(float), self.damping)
        return is_own


def is_close(values: Series, value: float) -> Series:
    """Say which values are the same as one, where both are known; what is unknown differs from nothing."""
    numbers = values.astype(float)
    is_same: Series = numbers.isna() | math.isnan(value) | np.isclose(numbers, value)
    return is_same


def main_setting(runs: DataFrame) -> DataFrame:
    """Return the runs of CAO in the paper's main setting: rank 1, top subspace, P as written; any η and momentum."""
    main = (runs["optimizer"] == "cao") & (runs["rank"] == 1) & (runs["sketch"] == "top")
    return runs[main & (runs["scaling"] == "inverse-damping") & is_usual(runs)]


def arms(runs: DataFrame, suite: str) -> list[Arm]:
    """Return each damping and clip of the main setting, the usual one first, then from the largest η down.

    All else is as at the usual one; where rates were tuned, each damping has its own.
    """
    main = main_setting(runs)
    main = main[main["momentum"] == 0]
    label = parts(runs, suite).get("cao")
    if label is None:
        return []
    first = main[main["label"] == label].iloc[0]
    if kind_of(suite) != "tuned":
        main = main[np.isclose(main["base_lr"], first["base_lr"]) & (main["refresh_every"] == first["refresh_every"])]
    pairs = [Arm(*pair) for pair in main[["damping", "clip"]].astype(float).drop_duplicates().to_numpy().tolist()]
    usual = Arm(float(first["damping"]), float(first["clip"]))
    others = {one.name: one for one in pairs if one.name != usual.name}
    return [usual, *sorted(others.values(), key=lambda one: (-one.damping, one.name))]


def parts(runs: DataFrame, suite: str, arm: Arm | None = None) -> dict[str, str]:
    """Return the label that plays each part in the runs of one task: `{"adam": "adam", "cao": "cao", …}`.

    Parts are recognised by configuration, not by label. `cao` is the paper's main setting: rank 1, top subspace,
    P as written, no momentum, and η and c as assumed where there are several and no arm is asked for. Everything else
    is relative to it.
    """
    of_cao = main_setting(runs)
    main, with_momentum = of_cao[of_cao["momentum"] == 0], of_cao[of_cao["momentum"] > 0]
    found = {"cao": representative(usual_damping(main) if arm is None else main[arm.has(main)])}
    found |= {"adam": representative(usual_adam(runs[runs["optimizer"] == "adam"], suite))}
    found |= {"adamw": representative(runs[runs["optimizer"] == "adamw"])}
    found |= {"cao-momentum": representative(usual_damping(with_momentum))}
    has_rules = runs["optimizer"] == "cao-defaults"
    found |= {"adaptive": representative(runs[has_rules & runs["refresh_every"].isna()])}
    found |= {"fixed": representative(runs[has_rules & runs["refresh_every"].notna()])}
    reference = runs[runs["label"] == found["cao"]]
    if reference.empty:
        found["sgd"] = representative(runs[(runs["optimizer"] == "sgd") & (runs["momentum"] > 0)])
    else:
        found |= relatives(runs, reference.iloc[0])
    if kind_of(suite) == "tuned":
        found |= tuned_controls(runs, arm)
    return {part: label for part, label in found.items() if label is not None}


def tuned_controls(runs: DataFrame, arm: Arm | None) -> dict[str, str | None]:
    """Return SGD, and the control of tuned runs: rank 0 at another η than the usual, SGD without momentum at that."""
    is_sgd, has_momentum = runs["optimizer"] == "sgd", runs["momentum"] > 0
    found = {
        "sgd": representative(runs[is_sgd & has_momentum]),
        "matched": representative(runs[is_sgd & ~has_momentum]),
    }
    if arm is not None and not math.isclose(arm.damping, DAMPING):
        is_rank_0 = (runs["optimizer"] == "cao") & (runs["rank"] == 0) & (runs["scaling"] == "inverse-damping")
        plain = representative(runs[is_rank_0 & arm.has(runs)])
        found |= {"matched": plain, "rank0-inverse": plain}
    return found


def usual_damping(runs: DataFrame) -> DataFrame:
    """Return the runs at the assumed η, and of these the ones at the assumed clip, or all if there are none."""
    usual = runs[np.isclose(runs["damping"].astype(float), DAMPING)]
    usual = runs if usual.empty else usual
    clipped = usual[is_close(usual["clip"] * usual["damping"], CLIP_GRADIENT)]
    return usual if clipped.empty else clipped


def usual_adam(runs: DataFrame, suite: str) -> DataFrame:
    """Return the runs of Adam at its standard rate, or all if there are none, or where rates were tuned."""
    usual = runs[np.isclose(runs["base_lr"], ADAM_LR)]
    return runs if usual.empty or kind_of(suite) in SEARCHING else usual


def relatives(runs: DataFrame, cao: Series) -> dict[str, str | None]:
    """Return the labels of the controls and of the other ranks, for a CAO run given as a row."""
    is_sgd, is_cao = runs["optimizer"] == "sgd", runs["optimizer"] == "cao"
    arm = Arm(float(cao["damping"]), float(cao["clip"]))
    matched = is_sgd & np.isclose(runs["base_lr"], cao["base_lr"] / arm.damping) & (runs["momentum"] == cao["momentum"])
    matched &= is_close(runs["clip"], arm.damping * arm.clip)
    alike = is_cao & np.isclose(runs["base_lr"], cao["base_lr"]) & arm.has(runs)
    alike &= (runs["momentum"] == cao["momentum"]) & (runs["refresh_every"] == cao["refresh_every"])
    found = {name: representative(runs[alike & (runs["rank"] == 1) & only(runs, name)]) for name in AS_PRINTED}
    alike &= is_usual(runs)
    top, written = runs["sketch"] == "top", runs["scaling"] == "inverse-damping"
    rank0 = alike & (runs["rank"] == 0)
    # With d = g there is no η in the step.
    unit = is_cao & (runs["rank"] == 0) & (runs["scaling"] == "unit") & np.isclose(runs["base_lr"], cao["base_lr"])
    found |= {"sgd": representative(papers_sgd(runs[is_sgd & ~matched], cao)), "matched": representative(runs[matched])}
    found |= {"rank0-inverse": representative(runs[rank0 & written])}
    found |= {"rank0-unit": representative(runs[unit & (runs["momentum"] == cao["momentum"])])}
    found |= {f"rank{rank}": representative(runs[alike & top & written & (runs["rank"] == rank)]) for rank in (3, 5)}
    for sketch in ("random", "projected-out"):
        found[sketch] = representative(runs[alike & (runs["sketch"] == sketch) & (runs["rank"] == 1)])
    # Rank 0 in the text's form is the same iteration as matched SGD, so either can serve as the control.
    found["matched"] = found["matched"] or found["rank0-inverse"]
    found["rank0-inverse"] = found["rank0-inverse"] or found["matched"]
    return found


def papers_sgd(runs: DataFrame, cao: Series) -> DataFrame:
    """Return the runs of SGD with momentum at CAO's base rate, as the paper has it, or the nearest that there is."""
    with_momentum = runs[runs["momentum"] > 0]
    shared = with_momentum[np.isclose(with_momentum["base_lr"], cao["base_lr"])]
    return next((some for some in (shared, with_momentum) if len(some)), runs)


AS_PRINTED = {
    "signed": ("negative_curvature", "signed", "magnitude"),
    "lanczos": ("eigensolver", "lanczos", "subspace"),
    "warm-up": ("warmup_steps", None, 0),
}
"""What the paper's text has and our main setting has not: a field, its value there (None is any other), and here."""


def is_usual(runs: DataFrame) -> Series:
    """Say of each CAO run whether it has our main setting's choices; logs from before a choice existed have them."""
    return (~DataFrame({name: differs(runs, name) for name in AS_PRINTED}, index=runs.index)).all(axis=1)


def only(runs: DataFrame, name: str) -> Series:
    """Say of each run whether it departs from our choices in this one, towards the paper's text."""
    field, value, _ = AS_PRINTED[name]
    others = DataFrame({one: differs(runs, one) for one in AS_PRINTED if one != name}, index=runs.index)
    is_as_printed = differs(runs, name) if value is None else runs[field] == value
    return is_as_printed & ~others.any(axis=1)


def differs(runs: DataFrame, name: str) -> Series:
    """Say of each run whether it departs from one of our choices."""
    field, _, usual = AS_PRINTED[name]
    return runs[field].notna() & (runs[field] != usual)


def final_train_losses(epochs: DataFrame) -> Series:
    """Return the last train loss of each run; infinite if it diverged, failed or ended in NaN, however low before."""
    last = epochs.drop_duplicates("run", keep="last").set_index("run")
    is_sound = ~last["status"].isin(["diverged", "failed"]) & np.isfinite(last["train_loss"])
    return last["train_loss"].where(is_sound, np.inf)


def representative(runs: DataFrame) -> str | None:
    """Return the label that speaks for several: most seeds, then the lowest mean of final train losses."""
    losses: dict[str, list[float]] = {}
    for label, loss in zip(runs["label"], runs["final_train_loss"], strict=True):
        losses.setdefault(str(label), []).append(loss)
    return min(losses, key=lambda label: (-len(losses[label]), np.mean(losses[label]), label), default=None)

"""What is fixed before the runs it judges: thresholds, margins, prices, and which run plays which part.

What was changed later is told in docs/notebook.md.
"""

import math

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import SUITES, Thresholds, dataset_of, kind_of, suites_of

CONFIDENCE = 0.95
ACCURACY_MARGIN = 0.01
"""Two accuracies are equal when the interval of their difference lies within ± one point."""
RATIO_MARGIN = 1.10
"""Two durations are equal when the interval of their ratio lies within ± 10 %: from 1/1.1 to 1.1."""
EARLY_SHARE = 0.4
"""The early window is the first 40 % of the budget: epochs 0 to 30 of 75 in the paper."""

TUNING_SEED = 0
"""The seed by which a rate is tuned; where fresh seeds follow, it is left out, for it flatters the chosen."""
PRODUCT_PRICE = {"hessian": 3.2, "gauss-newton": 2.1}
"""Gradient evaluations that one curvature product costs: an assumption, used until `cao bench` measured it."""
PRODUCT_PRICE_ROW = {
    "hessian": "hessian_product_per_gradient",
    "gauss-newton": "gauss_newton_product_per_gradient",
}
"""Names of the rows in `logs/bench.json` that replace the assumption."""

CHANCE_SHARES = Thresholds(0.75, (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))
"""For tasks below the paper's size, as shares of the loss of guessing, ln(classes)."""
STABLE_SHARE = 0.85
"""A rate is stable if the train loss falls below this share of ln(classes) within the budget."""


def declared_thresholds(task: str) -> Thresholds | None:
    """Return the thresholds of a task from its name alone, so that no outcome can move them.

    CIFAR at the paper's size has the paper's 0.75 and its range from 0.6 to 1.0. Where width or samples are reduced,
    0.75 nats may be out of reach for everyone, and the threshold is three quarters of ln(classes): a quarter of
    the loss of guessing is gone. Digits have 0.1. Other tasks have none.
    """
    dataset, model = dataset_of(task)
    if dataset is None or dataset.thresholds is None or not model or model.startswith("autoencoder"):
        return None
    is_full_size = dataset.models is None or model in dataset.models
    return dataset.thresholds if is_full_size else scaled(CHANCE_SHARES, math.log(dataset.classes or 1))


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


def stable_loss(task: str) -> float | None:
    """Return the train loss below which a run of a search for stable rates counts as stable."""
    dataset, _ = dataset_of(task)
    if dataset is None or dataset.thresholds is None or dataset.classes is None:
        return None
    return STABLE_SHARE * math.log(dataset.classes)


def without_tuning(rows: DataFrame) -> DataFrame:
    """Return runs, or their epochs, without the tuned suites' runs by which a rate was chosen before fresh seeds."""
    seeds = rows.groupby(["suite", "task", "label"])["seed"].transform("nunique")
    was_choosing = rows["suite"].isin(suites_of(["tuned"])) & (rows["seed"] == TUNING_SEED) & (seeds > 1)
    return rows[~was_choosing]


def parts(runs: DataFrame, suite: str) -> dict[str, str]:
    """Return the label that plays each part in the runs of one task: `{"adam": "adam", "cao": "cao", …}`.

    Parts are recognised by configuration, not by label. `cao` is the paper's main setting: rank 1, top subspace,
    P as written, no momentum (the default rank where every optimizer is tuned). Everything else is relative to it.
    """
    is_cao = runs["optimizer"] == "cao"
    main = is_cao & (runs["rank"] == 1) & (runs["sketch"] == "top") & (runs["scaling"] == "inverse-damping")
    found = {"cao": representative(runs[main & (runs["momentum"] == 0)])}
    found |= {name: representative(runs[runs["optimizer"] == name]) for name in ("adam", "adamw")}
    found |= {"cao-momentum": representative(runs[main & (runs["momentum"] > 0)])}
    reference = runs[runs["label"] == found["cao"]]
    if reference.empty:
        found["sgd"] = representative(runs[(runs["optimizer"] == "sgd") & (runs["momentum"] > 0)])
    else:
        found |= relatives(runs, reference.iloc[0])
    if kind_of(suite) == "tuned":
        found["sgd"] = found["matched"] = representative(runs[runs["optimizer"] == "sgd"])
    return {part: label for part, label in found.items() if label is not None}


def relatives(runs: DataFrame, cao: Series) -> dict[str, str | None]:
    """Return the labels of the controls and of the other ranks, for a CAO run given as a row."""
    is_sgd, is_cao = runs["optimizer"] == "sgd", runs["optimizer"] == "cao"
    rate = cao["base_lr"] / cao["damping"]
    matched = is_sgd & np.isclose(runs["base_lr"], rate) & (runs["momentum"] == cao["momentum"])
    alike = is_cao & np.isclose(runs["base_lr"], cao["base_lr"]) & np.isclose(runs["damping"], cao["damping"])
    alike &= (runs["momentum"] == cao["momentum"]) & (runs["refresh_every"] == cao["refresh_every"])
    top, written = runs["sketch"] == "top", runs["scaling"] == "inverse-damping"
    rank0 = alike & (runs["rank"] == 0)
    found = {"sgd": representative(runs[is_sgd & ~matched]), "matched": representative(runs[matched])}
    found |= {"rank0-inverse": representative(runs[rank0 & written])}
    found |= {"rank0-unit": representative(runs[rank0 & (runs["scaling"] == "unit")])}
    found |= {f"rank{rank}": representative(runs[alike & top & written & (runs["rank"] == rank)]) for rank in (3, 5)}
    for sketch in ("random", "projected-out"):
        found[sketch] = representative(runs[alike & (runs["sketch"] == sketch) & (runs["rank"] == 1)])
    # Rank 0 in the text's form is the same iteration as matched SGD, so either can serve as the control.
    found["matched"] = found["matched"] or found["rank0-inverse"]
    found["rank0-inverse"] = found["rank0-inverse"] or found["matched"]
    return found


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

"""The page's table of times to a threshold, at every threshold that its slider stops at, ready to be looked up."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cao_lab.reporting.analysis import LARGEST_DRAWN, Crossings, arrivals, crossings_by_label, speedups
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.tabular import NOT_REACHED, ratio, spread

STOPS = 32
"""Thresholds that the slider stops at, beside those that were declared."""
UNITS = {"epoch": 2, "seconds": 1, "gradient_cost": 0}
"""What is told of an arrival, and with how many digits."""
NOBODY = {"reached": 0, "seeds": 0}
NO_CROSSINGS: Crossings = {"epoch": {}, "seconds": {}}


def levels(setting: Setting, threshold: float) -> list[float]:
    """Return the thresholds to stop at, from the highest loss to the lowest: even on a log scale, and the declared."""
    # A run that diverges can reach any height, and would leave the slider no room for the others.
    sound = setting.best[setting.best["status"] != "diverged"]
    losses = (setting.best if sound.empty else sound)["train_loss"].to_numpy()
    losses = np.append(losses[(losses > 0) & (losses < LARGEST_DRAWN)], threshold)
    stops = [float(f"{stop:.4g}") for stop in np.geomspace(losses.max(), losses.min(), STOPS)]
    declared = [] if setting.thresholds is None else setting.thresholds.sweep
    inside = [loss for loss in declared if losses.min() <= loss <= losses.max()]
    return sorted({*stops, *inside, threshold}, reverse=True)


def times(setting: Setting, stops: list[float], labels: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what the page shows at each threshold, method by method; `speedups` has a list for each baseline."""
    hits = setting.hits(*stops)
    rows = {(row["threshold"], row["label"]): row for row in arrivals(hits).to_dict("records")}
    for level, own in hits.groupby("threshold", sort=False):
        crossings = crossings_by_label(own)
        yield {
            "methods": [method_times(rows.get((level, label), NOBODY)) for label in labels],
            "speedups": [[told(crossings, base, label) for label in labels] for base in labels],
        }


def method_times(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return one method's cells, and where its mark stands in each unit."""
    reached, seeds = int(row["reached"]), int(row["seeds"])
    cells, marks = [NOT_REACHED, "–", "–"], None
    if reached:
        means = [(row[f"{unit}_mean"], row[f"{unit}_std"], digits) for unit, digits in UNITS.items()]
        cells = [spread(mean, std, reached, reached, digits) for mean, std, digits in means]
        # A mark lies on its curve, which crosses the threshold within an epoch; an epoch of L-BFGS is several
        # iterations, and a mark would compare it with those of others.
        places = [row["crossing_epoch_mean"], row["crossing_seconds_mean"], row["gradient_cost_mean"]]
        marks = [None if math.isnan(place) else float(f"{place:.7g}") for place in places]
    return {"cells": [f"{reached} of {seeds}", *cells], "marks": marks, "isAll": reached == seeds}


def told(crossings: Mapping[str | None, Crossings], base: str, label: str) -> list[str]:
    """Return the speedups of a method over another, in epochs and in seconds."""
    found = speedups(crossings.get(base), crossings.get(label, NO_CROSSINGS))
    return [ratio(one.center, one.low, one.high) for one in found.values()]

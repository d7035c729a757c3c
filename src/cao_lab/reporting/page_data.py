"""What the page's script needs: curves, their means, and the table of times at every threshold to look up."""

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from pandas import DataFrame, MultiIndex, Series

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import CURVES, LARGEST_DRAWN, arrivals, gradient_cost, seed_band, undeclared_threshold
from cao_lab.reporting.intervals import all_ratios
from cao_lab.reporting.matrix import task_title
from cao_lab.reporting.palette import in_order, strokes
from cao_lab.reporting.rates import stability_edge
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.tabular import NOT_REACHED, ratio, spread

UNITS = ("epoch", "seconds", "cost")
"""What curves are drawn against."""
COLUMNS = [*UNITS, *CURVES]
POINTS = 100
"""Points of a curve that is longer; lowest and highest values are among them."""
SEED_POINTS, FEWEST_POINTS = 20_000, 24
"""Points of all curves of single seeds of one task together, and the fewest that each keeps."""
STOPS = 32
"""Thresholds that the slider stops at, beside those that were declared."""
ARRIVALS = {"epoch": 2, "seconds": 1, "gradient_cost": 0}
"""What is told of an arrival, and with how many digits."""
SPECTRUM = ["label", "seed", "optimizer", "index", "epoch", "eigenvalue", "is_captured", "edge"]
SHOWN_AT_FIRST = ("sgd", "adam", "cao", "matched", "rank0-inverse")
"""Parts whose curves are on when the page opens, where there are too many to show all."""
FEW_METHODS = 8
SYMBOLS = {"s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}
"""What the page calls the palette's markers."""


def page_data(found: list[Setting]) -> str:
    """Return everything as JSON that can stand inside a script element."""
    data = {"settings": [setting_data(one) for one in found if one.kind != "stability" and has_losses(one)]}
    # Inside a script element `</script`, but also `<!--` and `<script`, mean something to the browser.
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def has_losses(setting: Setting) -> bool:
    """Say whether there is a curve to draw."""
    return bool(np.isfinite(setting.epochs["train_loss"]).any())


def setting_data(setting: Setting) -> dict[str, Any]:
    """Return the curves of one task in one suite, and its times to each threshold."""
    epochs = setting.best.assign(cost=lambda table: gradient_cost(table, setting.prices))
    refreshes = setting.refreshes[setting.refreshes["label"].isin(epochs["label"])].assign(edge=stability_edge)
    methods = methods_data(setting, epochs)
    labels = [method["label"] for method in methods]
    order = {label: place for place, label in enumerate(labels)}
    declared = setting.thresholds
    threshold = float(f"{declared.primary if declared else undeclared_threshold(epochs):.7g}")
    stops = levels(setting, threshold)
    points = max(FEWEST_POINTS, min(POINTS, SEED_POINTS // epochs["run"].nunique()))
    # Of thousands of runs, each would be cut out of all columns.
    curves, spectra = epochs[["run", "label", "seed", *COLUMNS]], refreshes[["run", *SPECTRUM]]
    return {
        "suite": setting.suite,
        "task": setting.task,
        "title": f"{task_title(setting.task)} (suite {setting.suite})",
        "declared": stops.index(threshold),
        "isDeclared": declared is not None,
        "baseline": order.get(setting.labels.get("adam", ""), 0),
        "methods": methods,
        "levels": stops,
        "times": list(times(setting, stops, labels)),
        "runs": [run_data(run, order, points) for _, run in curves.groupby("run")],
        "spectra": [spectrum_data(rows, order, points) for _, rows in spectra.groupby("run")],
    }


def methods_data(setting: Setting, epochs: DataFrame) -> list[dict[str, Any]]:
    """Return the methods of a task with their strokes and mean curves, and whether they are on at first."""
    methods = in_order(setting.best)
    looks = strokes(setting.best)
    main = {setting.labels[part] for part in SHOWN_AT_FIRST if part in setting.labels}
    return [
        {
            "label": label,
            "name": name,
            "colour": looks[name].colour,
            "isDashed": looks[name].is_dashed,
            "marker": SYMBOLS.get(looks[name].marker),
            "isOn": len(methods) <= FEW_METHODS or not main or label in main,
            "band": band_data(epochs[epochs["label"] == label]),
        }
        for label, name in zip(methods["label"], methods["name"], strict=True)
    ]


def band_data(epochs: DataFrame) -> dict[str, Any] | None:
    """Return the mean of a method's runs with its standard deviation; none for a single run."""
    if epochs["run"].nunique() < 2:
        return None
    bands = {column: seed_band(epochs, column) for column in COLUMNS}
    shared = bands["epoch"].index
    parts = {edge: DataFrame({column: band[edge] for column, band in bands.items()}) for edge in ("mean", "std", "low")}
    means = parts["mean"].loc[shared, COLUMNS].to_numpy(float)
    kept = shared[thinned(means, COLUMNS.index("train_loss"), POINTS)]
    return {"mean": {column: numbers(parts["mean"].loc[kept, column]) for column in COLUMNS}} | {
        edge: {column: numbers(parts[edge].loc[kept, column]) for column in CURVES} for edge in ("std", "low")
    }


def run_data(run: DataFrame, order: dict[str, int], points: int) -> dict[str, Any]:
    """Return one run's columns."""
    values = run[COLUMNS].to_numpy(float)
    kept = values[thinned(values, COLUMNS.index("train_loss"), points)]
    head = {"method": order[run["label"].iloc[0]], "seed": int(run["seed"].iloc[0])}
    return head | {column: numbers(kept[:, place]) for place, column in enumerate(COLUMNS)}


def spectrum_data(rows: DataFrame, order: dict[str, int], points: int) -> dict[str, Any]:
    """Return one run's eigenvalues by index, and the edge of stability where there is one."""
    first, curves = rows.iloc[0], rows[["epoch", "eigenvalue"]].to_numpy(float)
    # Automatic damping moves the edge at every refresh, and a page that draws one line would be wrong.
    is_one = method_info(first["optimizer"]).has_edge and rows["edge"].nunique() == 1
    series = []
    for index in sorted(set(rows["index"])):
        is_own = (rows["index"] == index).to_numpy()
        own = curves[is_own]
        epoch, value = own[thinned(own, 1, points)].T
        is_captured = bool(rows["is_captured"].to_numpy()[is_own][0])
        series.append(
            {"index": int(index), "isCaptured": is_captured, "epoch": numbers(epoch), "value": numbers(value)}
        )
    edge = rounded(first["edge"]) if is_one else None
    return {"method": order[first["label"]], "seed": int(first["seed"]), "edge": edge, "series": series}


def thinned(curves: np.ndarray, by: int, points: int) -> np.ndarray:
    """Return about so many rows: the ends, the extremes of every stretch in one column, and those of all in each."""
    rows = np.arange(len(curves))
    if len(curves) <= points:
        return rows
    low, high = (np.where(np.isfinite(curves), curves, missing) for missing in (np.inf, -np.inf))
    stretches = np.array_split(rows, points // 2)
    extremes = [part[0] + at for part in stretches for at in (low[part, by].argmin(), high[part, by].argmax())]
    return np.unique([0, rows[-1], *low.argmin(axis=0), *high.argmax(axis=0), *extremes])


def numbers(column: Series | np.ndarray) -> list[float | None]:
    """Return a column for JSON, with seven digits; what is not finite is null."""
    return [rounded(value) for value in column.tolist()]


def rounded(value: float) -> float | None:
    """Return a number with seven significant digits, nothing for one that is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


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
    told = [speedups(hits, unit, stops, labels) for unit in ("crossing_epoch", "crossing_seconds")]
    for place, level in enumerate(stops):
        yield {
            "methods": [method_times(rows.get((level, label))) for label in labels],
            "speedups": np.stack([unit[place] for unit in told], axis=-1).tolist(),
        }


def speedups(hits: DataFrame, crossing: str, stops: list[float], labels: list[str]) -> np.ndarray:
    """Return in words how many times sooner each method crosses than each other: by threshold, baseline and method."""
    by_seed = hits.pivot(index=["threshold", "label"], columns="seed", values=crossing)
    crossings = by_seed.reindex(MultiIndex.from_product([stops, labels])).to_numpy(float)
    found = all_ratios(crossings.reshape(len(stops), len(labels), by_seed.shape[1]))
    # Over itself nobody is sooner.
    found[:, range(len(labels)), range(len(labels))] = math.nan
    texts = np.array([ratio(*ends) for ends in found.reshape(-1, 3).tolist()], dtype=object)
    return texts.reshape(found.shape[:-1])


def method_times(row: Mapping[Hashable, Any] | None) -> dict[str, Any]:
    """Return one method's cells, and where its mark stands in each unit."""
    reached, seeds = (int(row["reached"]), int(row["seeds"])) if row else (0, 0)
    cells, marks = [NOT_REACHED, "–", "–"], None
    if row and reached:
        means = [(row[f"{unit}_mean"], row[f"{unit}_std"], digits) for unit, digits in ARRIVALS.items()]
        cells = [spread(mean, std, reached, reached, digits) for mean, std, digits in means]
        # A mark lies on its curve, which crosses the threshold within an epoch; an epoch of L-BFGS is several
        # iterations, and a mark would compare it with those of others.
        places = [row["crossing_epoch_mean"], row["crossing_seconds_mean"], row["gradient_cost_mean"]]
        marks = [rounded(place) for place in places]
    return {"cells": [f"{reached} of {seeds}", *cells], "marks": marks, "isAll": reached == seeds}

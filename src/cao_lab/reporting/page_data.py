"""What the page's script needs: curves, their means, and the table of times at every threshold to look up."""

import json
import math
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import CURVES, gradient_cost, seed_band, undeclared_threshold
from cao_lab.reporting.page_times import levels, times
from cao_lab.reporting.palette import in_order, strokes
from cao_lab.reporting.rates import stability_edge
from cao_lab.reporting.setting import Setting

UNITS = ("epoch", "seconds", "cost")
"""What curves are drawn against."""
SHOWN_AT_FIRST = ("sgd", "adam", "cao", "matched", "rank0-inverse")
"""Parts whose curves are on when the page opens, where there are too many to show all."""
FEW_METHODS = 8
SYMBOLS = {"s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}
"""What the page calls the palette's markers."""


def page_data(found: list[Setting]) -> str:
    """Return everything as JSON that can stand inside a script element."""
    data = {"settings": [setting_data(one) for one in found if one.kind != "stability" and has_losses(one)]}
    # A closing tag inside a string would end the script element.
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")


def has_losses(setting: Setting) -> bool:
    """Say whether there is a curve to draw."""
    return bool(np.isfinite(setting.epochs["train_loss"]).any())


def setting_data(setting: Setting) -> dict[str, Any]:
    """Return the curves of one task in one suite, and its times to each threshold."""
    epochs = setting.best.assign(cost=lambda table: gradient_cost(table, setting.prices))
    refreshes = setting.refreshes[setting.refreshes["label"].isin(epochs["label"])]
    methods = methods_data(setting, epochs)
    labels = [method["label"] for method in methods]
    order = {label: place for place, label in enumerate(labels)}
    declared = setting.thresholds
    threshold = float(f"{declared.primary if declared else undeclared_threshold(epochs):.7g}")
    stops = levels(setting, threshold)
    return {
        "suite": setting.suite,
        "task": setting.task,
        "declared": stops.index(threshold),
        "isDeclared": declared is not None,
        "baseline": order.get(setting.labels.get("adam", ""), 0),
        "methods": methods,
        "levels": stops,
        "times": list(times(setting, stops, labels)),
        "runs": [run_data(run, order) for _, run in epochs.groupby("run")],
        "spectra": [spectrum_data(rows, order) for _, rows in refreshes.groupby("run")],
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
    bands = {column: seed_band(epochs, column) for column in (*UNITS, *CURVES)}
    shared = bands["epoch"].index
    means = {column: numbers(band["mean"].reindex(shared)) for column, band in bands.items()}
    edges = {
        edge: {column: numbers(bands[column][edge].reindex(shared)) for column in CURVES} for edge in ("std", "low")
    }
    return {"mean": means, **edges}


def run_data(run: DataFrame, order: dict[str, int]) -> dict[str, Any]:
    """Return one run's columns."""
    first = run.iloc[0]
    head = {"method": order[first["label"]], "seed": int(first["seed"])}
    return head | {column: numbers(run[column]) for column in (*UNITS, *CURVES)}


def spectrum_data(rows: DataFrame, order: dict[str, int]) -> dict[str, Any]:
    """Return one run's eigenvalues by index, and the edge of stability where there is one."""
    first = rows.iloc[0]
    edges = stability_edge(rows)
    # Automatic damping moves the edge at every refresh, and a page that draws one line would be wrong.
    is_one = method_info(first["optimizer"]).has_edge and edges.nunique() == 1
    edge = edges.iloc[0] if is_one else math.nan
    series = [
        {
            "index": int(str(index).removesuffix(".0")),
            "isCaptured": bool(group["is_captured"].iloc[0]),
            "epoch": numbers(group["epoch"]),
            "value": numbers(group["eigenvalue"]),
        }
        for index, group in rows.groupby("index")
    ]
    return {"method": order[first["label"]], "seed": int(first["seed"]), "edge": rounded(edge), "series": series}


def numbers(column: Series) -> list[float | None]:
    """Return a column for JSON, with seven digits; what is not finite is null."""
    return [rounded(value) for value in column.to_numpy(dtype=float)]


def rounded(value: float) -> float | None:
    """Return a number with seven significant digits, nothing for one that is not finite."""
    return float(f"{value:.7g}") if np.isfinite(value) else None

"""What the page's script needs to draw curves and to recompute the time-to-threshold table."""

import json
import math
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import (
    CURVES,
    WITHOUT_EPOCHS,
    gradient_cost,
    stability_edge,
    t_quantile,
    undeclared_threshold,
    with_losses_at_their_time,
)
from cao_lab.reporting.palette import in_order, strokes
from cao_lab.reporting.setting import Setting

LARGEST_SAMPLE = 50
"""Seeds up to which the page has Student's quantiles."""
SHOWN_AT_FIRST = ("sgd", "adam", "cao", "matched", "rank0-inverse")
"""Parts whose curves are on when the page opens, where there are too many to show all."""
FEW_METHODS = 8


def page_data(found: list[Setting]) -> str:
    """Return everything as JSON that can stand inside a script element."""
    data = {
        "quantiles": [t_quantile(freedom) for freedom in range(1, LARGEST_SAMPLE)],
        "settings": [setting_data(one) for one in found if one.kind != "stability" and has_losses(one)],
    }
    # A closing tag inside a string would end the script element.
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")


def has_losses(setting: Setting) -> bool:
    """Say whether there is a curve to draw."""
    return bool(np.isfinite(setting.epochs["train_loss"]).any())


def setting_data(setting: Setting) -> dict[str, Any]:
    """Return the curves of one task in one suite."""
    epochs = setting.best.assign(cost=lambda table: gradient_cost(table, setting.prices))
    seen = with_losses_at_their_time(epochs.assign(gradient_cost=epochs["cost"]))
    epochs = epochs.assign(seen_epoch=seen["epoch"], seen_seconds=seen["seconds"], seen_cost=seen["gradient_cost"])
    refreshes = setting.refreshes[setting.refreshes["label"].isin(epochs["label"])]
    methods = methods_data(setting)
    order = {method["label"]: place for place, method in enumerate(methods)}
    declared = setting.thresholds
    return {
        "suite": setting.suite,
        "task": setting.task,
        "threshold": rounded(declared.primary if declared else undeclared_threshold(epochs)),
        "isDeclared": declared is not None,
        "baseline": order.get(setting.labels.get("adam", ""), 0),
        "methods": methods,
        "runs": [run_data(run, order) for _, run in epochs.groupby("run")],
        "spectra": [spectrum_data(rows, order) for _, rows in refreshes.groupby("run")],
    }


def methods_data(setting: Setting) -> list[dict[str, Any]]:
    """Return the methods of a task with their strokes, and whether they are on at first."""
    methods = in_order(setting.best)
    looks = strokes(setting.best)
    main = {setting.labels[part] for part in SHOWN_AT_FIRST if part in setting.labels}
    return [
        {
            "label": label,
            "name": name,
            "colour": looks[name].colour,
            "isDashed": looks[name].is_dashed,
            "isOn": len(methods) <= FEW_METHODS or not main or label in main,
        }
        for label, name in zip(methods["label"], methods["name"], strict=True)
    ]


def run_data(run: DataFrame, order: dict[str, int]) -> dict[str, Any]:
    """Return one run's columns."""
    first = run.iloc[0]
    head = {"method": order[first["label"]], "seed": int(first["seed"]), "status": first["status"]}
    head |= {"hasEnded": bool(first["has_ended"]), "hasEpochs": first["optimizer"] not in WITHOUT_EPOCHS}
    if first["steps_per_epoch"] == 1:
        head["seen"] = {unit: numbers(run[f"seen_{unit}"]) for unit in ("epoch", "seconds", "cost")}
    return head | {column: numbers(run[column]) for column in ("epoch", "seconds", "cost", *CURVES)}


def spectrum_data(rows: DataFrame, order: dict[str, int]) -> dict[str, Any]:
    """Return one run's eigenvalues by index, and the edge of stability where there is one."""
    first = rows.iloc[0]
    edge = stability_edge(rows).iloc[0] if method_info(first["optimizer"]).has_edge else math.nan
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

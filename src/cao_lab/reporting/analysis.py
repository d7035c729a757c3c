"""What the logs say: first-hit epochs, means, speedups, costs. Tables in, tables out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import CURVATURES, METHODS, product_price_row
from cao_lab.reporting.intervals import all_ratios, ratio_interval
from cao_lab.reporting.logreader import RUN_KEY

LABEL_KEY = RUN_KEY[:-1]
TASK_KEY = RUN_KEY[:-2]
WITHOUT_EPOCHS = tuple(name for name, info in METHODS.items() if not info.has_epochs)
UNITS = ["epoch", "seconds", "gradient_cost"]
"""What the time to a threshold is counted in."""
LARGEST_DRAWN = 1e150
"""Beyond this a mean, or an axis, would overflow."""
CURVES = ["train_loss", "train_accuracy", "test_loss", "test_accuracy"]


def product_prices(epochs: DataFrame, bench: DataFrame) -> dict[str, float]:
    """Return the cost of a curvature product in gradient evaluations, on one task.

    That of its own runs if they tell it, for a product on a linear model is far cheaper than on a ResNet; else that of
    `cao bench`, else an assumption.
    """
    return usual_prices(bench) | own_prices(epochs)


def usual_prices(bench: DataFrame) -> dict[str, float]:
    """Return the cost of a curvature product on the network of `cao bench`: measured if there, else assumed."""
    measured = {} if bench.empty else dict(zip(bench["name"], bench["value"], strict=True))
    return {kind: float(measured.get(product_price_row(kind), price)) for kind, price in CURVATURES.items()}


def own_prices(epochs: DataFrame) -> dict[str, float]:
    """Return the price of a product as the seconds of the task's own runs tell it, by kind of curvature.

    The seconds of an epoch without products, per gradient, are those of SGD; what an epoch with products takes beyond
    its gradients is theirs. Medians, because a machine stumbles now and then.
    """
    steps = epochs.groupby("run")[["gradient_evaluations", "hessian_products"]]
    own = (epochs[["gradient_evaluations", "hessian_products"]] - steps.shift(fill_value=0.0)).fillna(0.0)
    rows = epochs.assign(gradients=own["gradient_evaluations"], products=own["hessian_products"])
    rows = rows[rows["has_ended"] & (rows["gradients"] > 0) & (rows["train_seconds"] > 0)]
    plain, curved = rows[rows["optimizer"] == "sgd"], rows[(rows["products"] > 0) & (rows["optimizer"] == "cao")]
    if plain.empty or curved.empty:
        return {}
    gradient = (plain["train_seconds"] / plain["gradients"]).median()
    surplus = (curved["train_seconds"] / gradient - curved["gradients"]) / curved["products"]
    found = surplus.groupby(curved["curvature"].fillna("hessian")).median()
    return {str(kind): float(price) for kind, price in found.items() if price > 0}


def gradient_cost(epochs: DataFrame, prices: dict[str, float]) -> Series:
    """Return the cost so far in gradient evaluations, curvature products counted at their price."""
    price = epochs["curvature"].map(prices).fillna(prices["hessian"])
    return epochs["gradient_evaluations"] + price * epochs["hessian_products"].fillna(0)


def ended_with_costs(epochs: DataFrame, prices: dict[str, float]) -> DataFrame:
    """Return the epochs of ended runs with what each cost, and beside it the epoch before: all but the threshold."""
    ended = epochs[epochs["has_ended"]].assign(gradient_cost=lambda table: gradient_cost(table, prices))
    kept = ["run", *RUN_KEY, "budget", "optimizer", "train_loss", *UNITS]
    ended = at_their_time(ended)[kept]
    lowest = ended["train_loss"].fillna(np.inf).groupby(ended["run"]).cummin()
    ended["lowest_before"] = lowest.groupby(ended["run"]).shift(fill_value=np.inf)
    return ended.join(ended.groupby("run")[["epoch", "train_loss", "seconds"]].shift().add_suffix("_before"))


def first_epoch_below(ended: DataFrame, thresholds: Sequence[float]) -> DataFrame:
    """Return one row per threshold and run: when its train loss first was at or below the threshold, NaN if never.

    `ended` is that of `ended_with_costs`. `epoch`, `seconds` and `gradient_cost` count to the end of that epoch, as the
    paper does. `crossing_epoch` and `crossing_seconds` count to where the straight line from the epoch before meets
    the threshold; ratios are taken of these, because at ten epochs one whole epoch is as large as the margin of ten
    per cent.
    """
    levels = DataFrame({"threshold": thresholds})
    # Only a loss below all before it can be the first below anything.
    records = ended[ended["train_loss"] < ended["lowest_before"]].merge(levels, how="cross")
    hits = records[(records["train_loss"] <= records["threshold"]) & (records["threshold"] < records["lowest_before"])]
    excess = (hits["threshold"] - hits["train_loss"]) / (hits["train_loss_before"] - hits["train_loss"])
    # Before the first epoch there is no point to draw the line from, nor after a loss that was not finite.
    excess = excess.where(np.isfinite(hits["train_loss_before"]), 0.0)
    crossings = {
        f"crossing_{unit}": hits[unit] - excess * (hits[unit] - hits[f"{unit}_before"]).fillna(0.0)
        for unit in ("epoch", "seconds")
    }
    hits = hits.assign(**crossings)
    hits["crossing_epoch"] = hits["crossing_epoch"].where(~hits["optimizer"].isin(WITHOUT_EPOCHS))
    runs = ended.drop_duplicates("run")[["run", *RUN_KEY, "budget"]]
    return levels.merge(runs, how="cross").merge(
        hits[["threshold", "run", *UNITS, *crossings]], on=["threshold", "run"], how="left"
    )


@dataclass(frozen=True)
class Goal:
    """A train loss to reach, and when each run first did."""

    loss: float
    hits: DataFrame


def at_their_time(epochs: DataFrame) -> DataFrame:
    """Return the epochs with the costs at which their train losses were seen.

    A full batch shows its loss before the epoch's only step: after the epochs before it, and one more gradient.
    """
    is_full_batch, units = epochs["steps_per_epoch"] == 1, [unit for unit in UNITS if unit in epochs]
    seen = epochs.groupby("run")[units].shift(fill_value=0.0)
    if "gradient_cost" in units:
        seen["gradient_cost"] += 1
    return epochs.assign(**{unit: epochs[unit].where(~is_full_batch, seen[unit]) for unit in units})


def by_seed(rows: DataFrame, column: str) -> dict[int, float]:
    """Return one column of the runs of one label by seed."""
    return dict(zip(rows["seed"].tolist(), rows[column].tolist(), strict=True))


def arrivals(hits: DataFrame) -> DataFrame:
    """Return one row per label of one task and threshold: how many seeds reached it, and when, over those that did."""
    groups = hits.groupby([*LABEL_KEY, "threshold"])
    grouped, crossed = groups[UNITS], groups[["crossing_epoch", "crossing_seconds"]].mean().add_suffix("_mean")
    mean, std = grouped.mean(), grouped.std()
    table = DataFrame({"seeds": grouped.size(), "reached": grouped.count()["epoch"]})
    columns = {f"{unit}_{name}": part[unit] for unit in UNITS for name, part in (("mean", mean), ("std", std))}
    return table.assign(**columns).join(crossed).reset_index()


def time_to_threshold(hits: DataFrame, baseline: str | None) -> DataFrame:
    """Return one row per label of one task: how many seeds reached the threshold, when, and the speedup.

    The mean and std are over the seeds that reached it, and `reached` of `seeds` says how many those are. The
    speedup is the baseline's crossing over the label's, over the seeds on which each reached the threshold.
    """
    table, columns = arrivals(hits), dict[str, np.ndarray]()
    for unit in ("epoch", "seconds"):
        own = hits.pivot(index="label", columns="seed", values=f"crossing_{unit}").reindex(table["label"])
        reference = own.reindex([baseline]).to_numpy(float)
        values = own.to_numpy(float, copy=True)
        # Over itself nobody is sooner.
        values[own.index == baseline] = math.nan
        pairs = np.stack([np.broadcast_to(reference, values.shape), values], axis=1)
        found = all_ratios(pairs)[:, 0, 1]
        columns |= {f"{unit}_speedup{end}": found[:, place] for place, end in enumerate(("", "_low", "_high"))}
        columns[f"{unit}_speedup_pairs"] = (~np.isnan(pairs)).sum(axis=-1).min(axis=-1)
    return table.assign(**columns)


def final_results(epochs: DataFrame) -> DataFrame:
    """Return one row an ended run: its last epoch's losses and accuracies, NaN if it diverged."""
    last = epochs[epochs["has_ended"]].drop_duplicates("run", keep="last").reset_index(drop=True)
    last.loc[last["status"] == "diverged", CURVES] = math.nan
    return last[[*RUN_KEY, "status", "epoch", *CURVES]]


def mean_and_std(runs: DataFrame, column: str) -> DataFrame:
    """Return one row a label: mean and std over the seeds that have a value, and how many do."""
    grouped = runs.groupby(LABEL_KEY)[column]
    return grouped.agg(mean="mean", std="std", count="count", seeds="size").reset_index()


def run_costs(epochs: DataFrame) -> DataFrame:
    """Return one row an ended run: mean seconds an epoch, and peak memory with its source.

    The mean, because not every epoch has a refresh, and a median would leave out what it costs.
    """
    ended = epochs[epochs["has_ended"]]
    by_run = ended.groupby("run")
    costs = DataFrame(
        {
            "seconds_per_epoch": by_run["train_seconds"].mean(),
            "peak_memory_mib": by_run["peak_memory_mib"].max(),
            "peak_memory_source": by_run["peak_memory_source"].last(),
        }
    )
    return ended.drop_duplicates("run")[["run", *RUN_KEY]].join(costs, on="run").reset_index(drop=True)


def cost_ratios(costs: DataFrame, baseline: str | None) -> DataFrame:
    """Return one row a label of one task: mean seconds an epoch, peak memory, their ratios to a baseline."""
    reference, rows = costs[costs["label"] == baseline], []
    for key, group in costs.groupby(LABEL_KEY):
        row = dict(zip(LABEL_KEY, key, strict=True)) | {"seeds": len(group)}
        row["peak_memory_source"] = group["peak_memory_source"].iloc[0]
        for unit in ("seconds_per_epoch", "peak_memory_mib"):
            ratio = ratio_interval(by_seed(group, unit), by_seed(reference, unit))
            row |= {unit: group[unit].mean(), f"{unit}_std": group[unit].std(), f"{unit}_ratio": ratio.center}
            row |= {f"{unit}_ratio_low": ratio.low, f"{unit}_ratio_high": ratio.high}
        rows.append(row)
    return DataFrame(rows)


def sensitivity(epochs: DataFrame, hits: DataFrame) -> DataFrame:
    """Return one row per run of a sweep over damping × refresh interval: epochs to threshold, last loss, seconds.

    Runs without a clip are no part of it.
    """
    epochs = epochs[~np.isinf(epochs["clip"].astype(float))]
    hits = hits[hits["run"].isin(epochs["run"].unique())]
    knobs = epochs.drop_duplicates("run").set_index("run")[["rank", "damping", "refresh_every"]]
    finals = final_results(epochs)[[*RUN_KEY, "train_loss", "test_accuracy", "status"]]
    cells = hits.drop(columns=["seconds", "threshold"]).join(knobs, on="run")
    cells = cells.merge(finals, on=RUN_KEY).merge(run_costs(epochs), on=["run", *RUN_KEY])
    return cells.sort_values(["task", "rank", "damping", "refresh_every", "seed"], ignore_index=True)


def seed_band(epochs: DataFrame, column: str, x: str = "epoch") -> DataFrame:
    """Return the mean curve of one label with its standard deviation, up to the end of its shortest run.

    Beyond that a mean would change its seeds, and jump; the single curves go on. `low` is where the band begins: one
    standard deviation below the mean, but not below every run, because on a logarithmic axis zero has no place.
    """
    finite = epochs[np.isfinite(epochs[column])].groupby("epoch")
    mean, std = finite[column].mean(), finite[column].std()
    low = (mean - std).clip(lower=finite[column].min())
    band = DataFrame({"x": finite[x].mean(), "mean": mean, "std": std, "low": low, "runs": finite.size()})
    return band[band["runs"] == epochs["run"].nunique()]


def undeclared_threshold(epochs: DataFrame) -> float:
    """Return a loss to start the page's slider at where none was declared: halfway down, on a log scale.

    Halfway between the median first loss and the median last loss of all runs, 1 if no loss is positive; no claim is
    judged by it.
    """
    positive = epochs[epochs["train_loss"].between(0, LARGEST_DRAWN, inclusive="neither")]
    losses = positive.groupby("run")["train_loss"]
    return 1.0 if positive.empty else math.sqrt(losses.first().median()) * math.sqrt(losses.last().median())

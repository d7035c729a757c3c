"""Which effective rates worked, and which a quadratic with the logged eigenvalues allows."""

import math

from pandas import DataFrame, Series

from cao_lab.facts import suites_of
from cao_lab.protocol import outcome_of_rate
from cao_lab.reporting.names import MIXED

STABILITY = suites_of(["stability"])


def effective_rate(runs: DataFrame) -> Series:
    """Return the rate on the complement of the sketch: α/η for CAO as written, α for everything else."""
    divided = (runs["optimizer"] == "cao") & (runs["scaling"] == "inverse-damping")
    return runs["base_lr"].where(~divided, runs["base_lr"] / runs["damping"])


def stability_edge(runs: DataFrame) -> Series:
    """Return the curvature 2(1+β)/α_eff above which a step with momentum β diverges on a quadratic."""
    return 2 * (1 + runs["momentum"].fillna(0)) / effective_rate(runs)


def stable_windows(epochs: DataFrame) -> DataFrame:
    """Return, for each method and seed that searched for it, the largest rate that worked and the next that did not.

    A method is an optimizer with its rank and momentum; `protocol.outcome_of_rate` says whether a rate α/η worked.
    `unstable` counts the runs that failed by instability; the others that failed were too slow.
    """
    trials = tried_rates(epochs)
    method, rows = ["task", "optimizer", "rank", "momentum", "seed"], []
    for key, group in trials.groupby(method, dropna=False):
        has_worked = group["outcome"] == "works"
        working = group[has_worked].sort_values("rate")
        largest, run = (math.nan, None) if working.empty else working.iloc[-1][["rate", "run"]]
        failed = group.loc[~has_worked & ~(group["rate"] <= largest), "rate"].min()
        unstable = int((group["outcome"] == "unstable").sum())
        is_mixed = bool(group["name"].str.endswith(MIXED).any())
        rows.append((*key, largest, failed, unstable, len(group), run, is_mixed))
    found = ["largest_stable", "smallest_unstable", "unstable", "trials", "run", "is_mixed"]
    return DataFrame(rows, columns=[*method, *found])


def tried_rates(epochs: DataFrame) -> DataFrame:
    """Return one row per ended run of a search for stable rates: its effective rate, and what became of it."""
    tried = epochs[epochs["suite"].isin(STABILITY) & epochs["has_ended"]]
    rows = tried.drop_duplicates("run").assign(rate=effective_rate)
    outcomes = {
        run: outcome_of_rate(own["task"].iloc[0], own["train_loss"].tolist(), own["status"].iloc[0] != "finished")
        for run, own in tried.groupby("run")
    }
    return rows.assign(outcome=rows["run"].map(outcomes))


def predicted_windows(epochs: DataFrame, refreshes: DataFrame) -> DataFrame:
    """Return the stable windows beside the largest rate that is stable on a quadratic of the logged eigenvalues.

    Taken from the run at the largest rate that worked: `predicted_first` is the limit at the start of training,
    `predicted_median` the median over the run, whose eigenvalues change. NaN where nothing tells a limit.
    """
    limits = quadratic_limits(refreshes[refreshes["suite"].isin(STABILITY)])
    first = limits[~limits.index.get_level_values("run").duplicated()].droplevel("step")
    windows = stable_windows(epochs)
    run = windows["run"]
    return windows.assign(predicted_first=run.map(first), predicted_median=run.map(limits.groupby("run").median()))


def quadratic_limits(eigenvalues: DataFrame) -> Series:
    """Return the α/η below which a step contracts on a quadratic, for each run and step with a refresh.

    Outside the sketch the step is (α/η)·λ, and less than 2 gives 2/λ; inside it is αλ/(λ + η), which gives 2/λ + 2/η.
    Along λ ≤ 0 a quadratic has no minimum, and so no rate is the limit of anything. The limit is NaN where no λ > 0
    outside the sketch is logged: positive ones may follow those that are, and they would decide.
    """
    is_captured = eigenvalues["is_captured"].astype(bool)
    limits = 2 / eigenvalues["eigenvalue"].where(eigenvalues["eigenvalue"] > 0)
    refresh = [eigenvalues["run"], eigenvalues["step"]]
    inside = (limits + 2 / eigenvalues["damping"]).where(is_captured).groupby(refresh).min()
    outside = limits.where(~is_captured).groupby(refresh).min()
    return outside.where(~(inside < outside), inside)

"""The suite watch: which alarms sound before a training diverges, how often in vain, and what the sharpness costs."""

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from cao_lab.reporting.figures import styled
from cao_lab.reporting.tabular import Table

RUNS, LOOKS = "runs.csv", "looks.csv"
ALARMS = {
    "ratio 1% 1": "ratio above 1, watched for 1 % of the time", "ratio 1% 2": "ratio above 2, 1 %",
    "ratio 10% 1": "ratio above 1, 10 %", "ratio 10% 2": "ratio above 2, 10 %",
    "gradient 5": "gradient's norm above 5 medians", "gradient 20": "above 20 medians",
    "loss 3": "loss above 3 medians", "loss 10": "above 10 medians",
}  # fmt: skip
BUDGETS = ("1%", "10%")
EARLIEST, AHEAD = 30, 10
"""A run that diverges before this step is left out, and an alarm is ahead if it is so many steps earlier."""


@dataclass(frozen=True)
class Heard:
    """How an alarm did over some runs."""

    ahead: int
    diverged: int
    false: int
    others: int
    lead: float

    @property
    def text(self) -> list[str]:
        """The cells of a table."""
        return [f"{self.ahead} of {self.diverged}", f"{self.lead:.0f}", f"{self.false} of {self.others}"]


@dataclass(frozen=True)
class Watched:
    """Runs of the suite, and their looks."""

    runs: DataFrame
    looks: DataFrame


def load_watched(folder: Path, missing: list[str]) -> Watched | None:
    """Return the runs in a folder and their looks, None where there are none."""
    paths = [folder / name for name in (RUNS, LOOKS)]
    if not all(path.exists() for path in paths):
        return None
    try:
        runs, looks = (pd.read_csv(path) for path in paths)
        numbers = dict.fromkeys(["diverged", *ALARMS], float)
        return Watched(runs.astype(numbers), looks.astype({"seen": float, "true": float}))
    except (KeyError, ValueError) as error:
        missing.append(f"watch: {' '.join(str(error).split())}, left out")
        return None


def heard(runs: DataFrame, alarm: str) -> Heard:
    """Return how an alarm did."""
    diverged = runs[runs["diverged"] >= EARLIEST]
    others = runs[runs["diverged"].isna()]
    leads = (diverged["diverged"] - diverged[alarm]).fillna(0).clip(lower=0)
    lead = float(leads.median()) if len(leads) else math.nan
    return Heard(int((leads >= AHEAD).sum()), len(diverged), int(others[alarm].notna().sum()), len(others), lead)


def alarms_table(runs: DataFrame) -> Table:
    """Return how each alarm did, over all runs and by optimizer."""
    rows, numbers = [], []
    for name, title in ALARMS.items():
        parts = {"all": runs, **dict(list(runs.groupby("optimizer")))}
        found = {part: heard(each, name) for part, each in parts.items()}
        by = [f"{each.ahead} / {each.diverged}, {each.false} / {each.others}" for each in list(found.values())[1:]]
        rows.append([title, *found["all"].text, *by])
        numbers += [{"alarm": name, "runs": part, **vars(each)} for part, each in found.items()]
    kinds = [f"{kind}: ahead, false" for kind in sorted(runs["optimizer"].unique())]
    columns = ["alarm", "at least 10 steps ahead", "median lead", "false", *kinds]
    return Table("watch-alarms", "Alarms of the suite watch.", DataFrame(rows, columns=columns), DataFrame(numbers))


def watch_goals_table(watched: Watched, long: Watched) -> Table:
    """Return the goals of the suite, and what was measured: accuracy and cost in long runs, alarms in all others."""
    errors = {name: (each["seen"] / each["true"] - 1).abs() for name, each in long.looks.groupby("budget")}
    gradient = heard(watched.runs, "gradient 5")
    ratios = [heard(watched.runs, f"ratio {name} 1") for name in BUDGETS]
    rows = [
        ("error of λ, median", "≤ 0.1", *(errors[name].median() for name in BUDGETS)),
        ("share of the time, largest", "≤ 0.01", *(long.runs[f"share {name}"].max() for name in BUDGETS)),
        ("looks in 6,000 steps, median", "", *(long.runs[f"looks {name}"].median() for name in BUDGETS)),
        ("alarm at least 10 steps ahead", "≥ 0.8", *(each.ahead / max(each.diverged, 1) for each in ratios)),
        ("false alarm", "≤ 0.1", *(each.false / max(each.others, 1) for each in ratios)),
        ("median lead, steps", f"> {gradient.lead:.0f}", *(each.lead for each in ratios)),
    ]
    numbers = DataFrame(rows, columns=["what", "goal", "at 1 %", "at 10 %"])
    texts = {name: [f"{value:.3g}" for value in numbers[name]] for name in ("at 1 %", "at 10 %")}
    reached = [is_reached(goal, value) for goal, value in zip(numbers["goal"], numbers["at 1 %"], strict=True)]
    cells = numbers.assign(**texts, **{"reached at 1 %": reached})
    return Table("watch-goals", "The goals of the suite watch, and what was measured.", cells, numbers)


def is_reached(goal: str, value: float) -> str:
    """Return whether a goal is reached, in a word; none without a goal."""
    if not goal:
        return ""
    sign, bound = goal.split()
    return "yes" if {"≤": value <= float(bound), "≥": value >= float(bound), ">": value > float(bound)}[sign] else "no"


def watch_tables(logs: Path, missing: list[str]) -> list[Table]:
    """Return the tables of the suite, if there are logs of it."""
    watched, long = load_watched(logs / "watch", missing), load_watched(logs / "watch/long", missing)
    return [] if watched is None or long is None else [watch_goals_table(watched, long), alarms_table(watched.runs)]


def readings_in(logs: Path, missing: list[str]) -> DataFrame | None:
    """Return what a `Sharpness` wrote to `watch.csv` beside the suites, None if there is no such file."""
    path = logs / "watch.csv"
    if not path.is_file():
        return None
    try:
        return pd.read_csv(path)[["step", "sharpness", "preconditioned", "ratio", "lr", "edge"]].astype(float)
    except (KeyError, ValueError) as error:
        missing.append(f"{path.name}: {' '.join(str(error).split())}, left out")
        return None


@styled
def sharpness_figure(readings: DataFrame) -> Figure:
    """Draw how a training comes near its edge of stability: the curvature above, its ratio to the edge below."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(readings["step"], readings["preconditioned"], label="curvature as the optimizer feels it")
    above.plot(readings["step"], readings["edge"], "--", label="edge of stability")
    below.plot(readings["step"], readings["ratio"])
    below.axhline(1, color="0.4", linestyle="--", linewidth=1)
    above.set(yscale="log", ylabel="curvature")
    below.set(xlabel="step", ylabel="ratio to the edge", ylim=(0, None))
    above.legend(frameon=False)
    return figure

"""Figures of curves: each function takes tables and returns a figure, for any dataset, model and threshold."""

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from pandas import DataFrame

from cao_lab.facts import method_info
from cao_lab.protocol import is_usual
from cao_lab.reporting.analysis import LARGEST_DRAWN, Goal, at_their_time, seed_band
from cao_lab.reporting.palette import Stroke, strokes

STYLE = Path(__file__).with_name("cao.mplstyle")
LEGEND_WIDTH = 28
"""Letters that fit beside the axes."""
MARK_EVERY = 0.12
"""Share of the axes between two markers of a curve."""
PLAIN_NUMBERS = StrMethodFormatter("{x:g}")
styled = matplotlib.style.context(STYLE)
AXES = {
    "train_loss": "train loss", "train_accuracy": "train accuracy", "test_accuracy": "test accuracy",
    "test_loss": "test loss", "epoch": "epochs", "seconds": "seconds of training",
}  # fmt: skip


@styled
def curve_figure(
    runs: DataFrame,
    column: str = "train_loss",
    x: str = "epoch",
    goal: Goal | None = None,
    last_epoch: float | None = None,
) -> Figure:
    """Draw a quantity over training: mean over seeds with a band of one standard deviation, single seeds thin.

    The mean ends where the first seed ends; a single seed is marked †, a run that diverged ends in a cross. With a
    goal, a dot marks where the mean reaches it, hollow if not every seed did. What rises far above the start leaves the
    frame, so that one diverging run does not press the others flat; a method of which a seed ends there is marked ↑.
    """
    figure = Figure()
    axes = figure.add_subplot()
    runs = at_their_time(runs)
    shown = drawable(runs if last_epoch is None else runs[runs["epoch"] <= last_epoch], column)
    highest = ceiling(shown, column) if column.endswith("loss") else np.inf
    for name, stroke in strokes(shown).items():
        own = shown[shown["name"] == name]
        ends = own[np.isfinite(own[column])].drop_duplicates("run", keep="last")[column]
        label = legend_name(own, x, has_left=bool((ends > highest).any()))
        draw_method(axes, own, column, x, stroke, label=label)
    if goal is not None:
        draw_goal(axes, shown, x, goal)
    if column.endswith("loss"):
        frame_losses(axes, shown, column)
    axes.set(xlabel=x_label(runs, x), ylabel=AXES[column], title=title(runs))
    axes.xaxis.set_major_locator(MaxNLocator(integer=x == "epoch"))
    if shown[x].nunique() == 1:
        axes.set_xlim(0, 2 * shown[x].iloc[0] or 1)
    curves, names = axes.get_legend_handles_labels()
    if curves:
        wrapped = [fill(name, LEGEND_WIDTH) for name in names]
        axes.legend(curves, wrapped, loc="upper left", bbox_to_anchor=(1.01, 1.02))
    return figure


def x_label(runs: DataFrame, x: str) -> str:
    """Return what the horizontal axis counts: an epoch of a full batch is a step."""
    return "steps" if x == "epoch" and (runs["steps_per_epoch"] == 1).all() else AXES[x]


def frame_losses(axes: Axes, shown: DataFrame, column: str) -> None:
    """Choose the scale of an axis of losses, and cut off what lies far above the start."""
    highest = ceiling(shown, column)
    inside = shown.loc[shown[column].abs() <= highest, column].to_numpy()
    is_log = bool((shown[column] > 0).all()) and spans_decades(inside)
    if (shown[column] > highest).any() and inside.size:
        margin = 0.05 * (inside.max() - inside.min())
        axes.set_ylim(inside.min() / 1.2 if is_log else inside.min() - margin, inside.max() + margin)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.yaxis.set_minor_formatter(NullFormatter())


def ceiling(shown: DataFrame, column: str) -> float:
    """Return the loss above which a curve leaves the frame: three times the median first loss."""
    first = shown.loc[np.isfinite(shown[column])].drop_duplicates("run")[column]
    return float(3 * first.median()) if len(first) else np.inf


def drawable(rows: DataFrame, column: str) -> DataFrame:
    """Return rows in which numbers so large that an axis would overflow are infinite, and so not drawn."""
    return rows.assign(**{column: rows[column].mask(rows[column].abs() > LARGEST_DRAWN, np.inf)})


def spans_decades(values: np.ndarray) -> bool:
    """Say whether positive values spread over more than a factor of 30."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.max() > 30 * finite.min())


def title(runs: DataFrame) -> str:
    """Return what the runs are about: task and suite."""
    return plain(f"{runs['task'].iloc[0]}  ({runs['suite'].iloc[0]})")


def plain(name: str) -> str:
    """Return a name in which matplotlib finds no mathematics."""
    return name.replace("$", r"\$")


def legend_name(runs: DataFrame, x: str, has_left: bool) -> str:
    """Return a method's name with what is to be known of its curve, and of its epochs where they are no measure."""
    marks = f"{' †' if runs['seed'].nunique() == 1 else ''}{' ↑' if has_left else ''}"
    said = "" if is_counted(runs, x) else f", {x_label(runs, x)} of several iterations"
    return plain(f"{runs['name'].iloc[0]}{marks}{said}")


def is_counted(runs: DataFrame, x: str) -> bool:
    """Say whether the horizontal axis is a measure of a method's effort: epochs are none of L-BFGS."""
    return x != "epoch" or method_info(runs["optimizer"].iloc[0]).has_epochs


def draw_method(axes: Axes, runs: DataFrame, column: str, x: str, stroke: Stroke, *, label: str) -> None:
    """Draw one method: each seed thin, their mean and band strong."""
    finite = runs[np.isfinite(runs[column])]
    if finite.empty:
        return
    seeds = runs["seed"].nunique()
    dash = (0, (4, 1.6)) if stroke.is_dashed else "-"
    for _, run in finite.groupby("run"):
        if seeds > 1:
            axes.plot(run[x], run[column], color=stroke.colour, linewidth=0.6, alpha=0.3)
        if run["status"].iloc[0] == "diverged":
            axes.plot(run[x].iloc[-1], run[column].iloc[-1], marker="x", color=stroke.colour, linestyle="none")
    band = seed_band(runs, column, x)
    order = 2.0 if stroke.is_dashed else 2.5
    look: dict[str, Any] = {"color": stroke.colour, "linestyle": dash, "zorder": order, "label": label}
    if stroke.marker:
        look |= {"marker": stroke.marker, "markersize": 4, "markevery": MARK_EVERY}
    # A single point has no line to be drawn with, nor a length along which markers could be spread.
    if len(band) == 1:
        look |= {"marker": stroke.marker or ".", "markevery": None}
    axes.plot(band["x"], band["mean"], **look)
    if seeds > 1:
        high = band["mean"] + band["std"]
        axes.fill_between(band["x"], band["low"], high, color=stroke.colour, alpha=0.15, linewidth=0)


def draw_goal(axes: Axes, shown: DataFrame, x: str, goal: Goal) -> None:
    """Draw the loss to reach, and dots where methods reach it: where their mean does, or else each seed that does."""
    reached = goal.hits[goal.hits["epoch"].notna()].set_index("run")[f"crossing_{x}"]
    for name, stroke in strokes(shown).items():
        own = shown[shown["name"] == name]
        if not is_counted(own, x):
            continue
        band = seed_band(own, "train_loss", x)
        mean = crossing(band["x"].to_numpy(), band["mean"].to_numpy(), goal.loss)
        has_all = set(reached.index).issuperset(own["run"])
        places = [mean] if np.isfinite(mean) or has_all else reached[reached.index.isin(own["run"])]
        face = stroke.colour if has_all else "white"
        size, order = 5.5 if np.isfinite(mean) else 4.0, 3.0 if stroke.is_dashed else 3.5
        for place in places:
            if place <= own[x].max():
                axes.plot(place, goal.loss, "o", ms=size, color=stroke.colour, mfc=face, zorder=order)
    dots: dict[str, Any] = {"color": "#444444", "linewidth": 0.8, "linestyle": (0, (2, 2))}
    axes.axhline(goal.loss, label=f"threshold {goal.loss:.4g}", **dots)


def crossing(x: np.ndarray, losses: np.ndarray, goal: float) -> float:
    """Return where a curve first comes down to a loss, NaN if it never does."""
    below = np.flatnonzero(losses <= goal)
    if not below.size:
        return float("nan")
    at = below[0]
    if at == 0:
        return float(x[0])
    return float(np.interp(goal, [losses[at], losses[at - 1]], [x[at], x[at - 1]]))


def rank_ablation(runs: DataFrame) -> DataFrame:
    """Return the CAO runs that differ from each other in rank alone, both forms of rank 0 among them."""
    cao = runs[(runs["optimizer"] == "cao") & (runs["sketch"] == "top") & (runs["momentum"] == 0) & is_usual(runs)]
    kept = cao[(cao["scaling"] == "inverse-damping") | (cao["rank"] == 0)]
    rest = kept[["base_lr", "damping", "refresh_every"]]
    return kept[(rest == rest.mode().iloc[0]).all(axis=1)] if len(kept) else kept

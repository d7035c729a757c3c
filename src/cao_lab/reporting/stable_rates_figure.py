"""The figure of the largest rates that work, beside the predicted."""

import math
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from pandas import DataFrame

from cao_lab.reporting.figures import PLAIN_NUMBERS, plain, styled
from cao_lab.reporting.names import method_name

PANEL_WIDTH, LETTER_WIDTH = 4.0, 0.08
"""Inches, names and all."""
LEADS = (
    tuple(lead / 10 for lead in range(10, 100)), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5),
    (1, 3), (1,),
)  # fmt: skip
"""First digits that an axis may label, the finest first."""


@styled
def stable_window_figure(windows: DataFrame) -> Figure:
    """Draw, for each task and method, the largest effective rate that works, the next that fails, and the predicted.

    Seeds lie closely below each other.
    """
    tasks = sorted(windows["task"].unique())
    height = 1.8 + 0.2 * windows.groupby("task").size().max()
    figure = Figure(figsize=(PANEL_WIDTH * max(len(tasks), 2), height), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        draw_windows(axes, windows[windows["task"] == task])
        axes.set_title(plain(task))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_windows(axes: Axes, rows: DataFrame) -> None:
    """Draw the windows of one task: a row per seed, those of one method together."""
    methods = [plain(method_name(row)) for _, row in rows.iterrows()]
    distinct = list(dict.fromkeys(methods))
    seeds = sorted(rows["seed"].unique())
    between = min(0.25, 0.75 / len(seeds))
    shift = {seed: between * (place - (len(seeds) - 1) / 2) for place, seed in enumerate(seeds)}
    places = [distinct.index(method) + shift[seed] for method, seed in zip(methods, rows["seed"], strict=True)]
    for place, low, high in zip(places, rows["largest_stable"], rows["smallest_unstable"], strict=True):
        axes.plot([low, high], [place, place], color="#c2185b", linewidth=1.2)
    axes.plot(rows["largest_stable"], places, "o", color="#c2185b", label="largest that works")
    axes.plot(rows["smallest_unstable"], places, "x", color="#555555", label="next that fails")
    axes.plot(rows["predicted_first"], places, "<", color="#1565c0", mfc="none", label="predicted at the start")
    axes.plot(rows["predicted_median"], places, "D", color="#1565c0", mfc="none", label="predicted over the run")
    predicted = rows[["predicted_first", "predicted_median"]].notna().any(axis=1)
    for place, works, is_predicted in zip(places, rows["largest_stable"], predicted, strict=True):
        said = "no rate works" if np.isnan(works) else "" if is_predicted else "no prediction"
        axes.annotate(said, (1.0, place), xycoords=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    axes.set(xscale="log", xlabel="effective rate α/η")
    label_rates(axes, PANEL_WIDTH - LETTER_WIDTH * max(map(len, distinct)) - 0.4)
    axes.set_yticks(range(len(distinct)), distinct)
    axes.invert_yaxis()


def label_rates(axes: Axes, inches: float) -> None:
    """Label a logarithmic axis of so many inches as finely as labels fit, by powers alone where none do."""
    low, high = np.log10(axes.get_xlim())
    decades = range(math.floor(low), math.ceil(high))
    for leads in LEADS:
        ticks = [
            lead * 10.0**decade for decade in decades for lead in leads if low <= math.log10(lead) + decade <= high
        ]
        widths = [LETTER_WIDTH * (len(f"{tick:g}") + 1) for tick in ticks]
        places = [inches * math.log10(tick) / (high - low) for tick in ticks]
        room = [after - before for before, after in pairwise(places)]
        needed = [(before + after) / 2 for before, after in pairwise(widths)]
        if room and np.all(np.array(room) >= needed):
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
            return

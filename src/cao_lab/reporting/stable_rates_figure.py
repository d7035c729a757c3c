"""The figure of the largest rates that work, beside the predicted."""

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from cao_lab.reporting.figures import plain, styled
from cao_lab.reporting.names import method_name


@styled
def stable_window_figure(windows: DataFrame) -> Figure:
    """Draw, for each task and method, the largest effective rate that works, the next that fails, and the predicted.

    Seeds lie closely below each other.
    """
    tasks = sorted(windows["task"].unique())
    figure = Figure(figsize=(8.0, 1.8 + 0.2 * windows.groupby("task").size().max()), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        rows = windows[windows["task"] == task]
        methods = [plain(method_name(row)) for _, row in rows.iterrows()]
        distinct = list(dict.fromkeys(methods))
        seeds = sorted(rows["seed"].unique())
        shift = {seed: 0.25 * (place - (len(seeds) - 1) / 2) for place, seed in enumerate(seeds)}
        places = [distinct.index(method) + shift[seed] for method, seed in zip(methods, rows["seed"], strict=True)]
        for place, low, high in zip(places, rows["largest_stable"], rows["smallest_unstable"], strict=True):
            axes.plot([low, high], [place, place], color="#c2185b", linewidth=1.2)
        axes.plot(rows["largest_stable"], places, "o", color="#c2185b", label="largest that works")
        axes.plot(rows["smallest_unstable"], places, "x", color="#555555", label="next that fails")
        axes.plot(rows["predicted_first"], places, "<", color="#1565c0", mfc="none", label="predicted at the start")
        axes.plot(rows["predicted_median"], places, "D", color="#1565c0", mfc="none", label="predicted over the run")
        for place, works, predicted in zip(places, rows["largest_stable"], rows["predicted_first"], strict=True):
            said = "no rate works" if np.isnan(works) else "no prediction" if np.isnan(predicted) else ""
            axes.annotate(said, (1.0, place), xycoords=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
        axes.set(xscale="log", xlabel="effective rate α/η", title=plain(task))
        axes.set_yticks(range(len(distinct)), distinct)
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure

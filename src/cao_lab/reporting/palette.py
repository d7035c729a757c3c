"""Which colour, dash and marker a method has: the same in every figure and on the page.

Colours were chosen so that the colour-blind can tell them apart, and a test holds them to it. A dash says control, and
nothing else does; where there are more methods than colours, a colour begins anew with a marker.
"""

from collections import Counter
from dataclasses import dataclass

from pandas import DataFrame, Series

from cao_lab.facts import METHODS
from cao_lab.protocol import is_usual

CURVED = ("#c2185b", "#be8a1c", "#8b0afc", "#792000")
"""Warm colours for CAO with curvature, by rank and variant."""
PLAIN = {name: info.colour for name, info in METHODS.items() if info.colour is not None}
CONTROLS = ("#6b7280", "#9c6ade", "#3f8f8a", "#a16207", "#94a3b8", "#7c8a3a")
"""Controls are dashed: they hold the rate and leave the curvature out, or take a wrong one."""
MARKERS = ("", "s", "^", "D", "v")
"""As matplotlib writes them, for the first, second, … method of a colour."""


@dataclass(frozen=True)
class Stroke:
    """How a method's curve is drawn."""

    colour: str
    is_dashed: bool = False
    marker: str = ""


def in_order(runs: DataFrame) -> DataFrame:
    """Return one row a method of one task: by optimizer, then rank, then name."""
    return runs.drop_duplicates("name").sort_values(["optimizer", "rank", "name"], ignore_index=True)


def coloured(epochs: DataFrame, best: DataFrame) -> DataFrame:
    """Put a stroke beside every row of one task, so that a figure of some methods keeps the colours of all.

    The best of each method choose first; the rates that were tried besides take what is left.
    """
    looks = assigned(epochs) | assigned(best)
    columns = ("colour", "is_dashed", "marker")
    return epochs.assign(**{column: [getattr(looks[name], column) for name in epochs["name"]] for column in columns})


def strokes(runs: DataFrame) -> dict[str, Stroke]:
    """Return a stroke for each name among the runs of one task, in the order in which methods are listed."""
    if "colour" not in runs:
        return assigned(runs)
    methods = in_order(runs)[["name", "colour", "is_dashed", "marker"]]
    return {name: Stroke(*look) for name, *look in methods.itertuples(index=False)}


def assigned(runs: DataFrame) -> dict[str, Stroke]:
    """Choose a stroke for each name: a method's own colour, warm ones for CAO with curvature, dashes for controls.

    A method that is not listed in the facts takes the colour of one that is absent.
    """
    methods = in_order(runs)
    absent = [colour for name, colour in PLAIN.items() if name not in set(methods["optimizer"])]
    colours = {"curved": CURVED, "control": CONTROLS, "other": absent[::-1] or CONTROLS}
    found: dict[str, Stroke] = {}
    used: Counter[str] = Counter()
    # Our main setting's choices come first, so that variants of them never take the colour of a rank.
    for _, method in methods.loc[(~is_usual(methods)).sort_values(kind="stable").index].iterrows():
        family = family_of(method, is_first=not used[method["optimizer"]])
        own = [PLAIN[family]] if family in PLAIN else colours[family]
        again, place = divmod(used[family], len(own))
        found[method["name"]] = Stroke(own[place], family == "control", MARKERS[again % len(MARKERS)])
        used[family] += 1
    return {name: found[name] for name in methods["name"]}


def family_of(method: Series, is_first: bool) -> str:
    """Say with whom a method shares its colours; SGD that is not the first is there as the control of another rate."""
    optimizer = str(method["optimizer"])
    if optimizer == "cao":
        return "control" if method["rank"] == 0 or method["sketch"] in ("random", "projected-out") else "curved"
    if optimizer == "sgd" and not is_first:
        return "control"
    return optimizer if optimizer in PLAIN else "other"

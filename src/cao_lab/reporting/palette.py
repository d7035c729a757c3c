"""Which colour and dash a method has: the same in every figure and on the page.

Solid colours were chosen so that the colour-blind can tell them apart, and a test holds them to it.
"""

from dataclasses import dataclass

from pandas import DataFrame

from cao_lab.facts import METHODS

CURVED = ("#c2185b", "#be8a1c", "#8b0afc", "#792000")
"""Warm colours for CAO with curvature, by rank and variant."""
PLAIN = {name: info.colour for name, info in METHODS.items() if info.colour is not None}
OTHERS = ("#ef7bd9", "#b8aab2", "#310508", "#020336")
CONTROLS = ("#6b7280", "#9c6ade", "#3f8f8a", "#a16207", "#94a3b8", "#7c8a3a")
"""Controls are dashed: they hold the rate and leave the curvature out, or take a wrong one."""


@dataclass(frozen=True)
class Stroke:
    """How a method's curve is drawn."""

    colour: str
    is_dashed: bool = False


def in_order(runs: DataFrame) -> DataFrame:
    """Return one row a method of one task: by optimizer, then rank, then name."""
    return runs.drop_duplicates("name").sort_values(["optimizer", "rank", "name"], ignore_index=True)


def coloured(epochs: DataFrame, best: DataFrame) -> DataFrame:
    """Put a stroke beside every row of one task, so that a figure of some methods keeps the colours of all.

    The best of each method choose first; the rates that were tried besides take what is left.
    """
    looks = assigned(epochs) | assigned(best)
    colours = epochs["name"].map({name: stroke.colour for name, stroke in looks.items()})
    return epochs.assign(colour=colours, is_dashed=epochs["name"].map({n: s.is_dashed for n, s in looks.items()}))


def strokes(runs: DataFrame) -> dict[str, Stroke]:
    """Return a stroke for each name among the runs of one task, in the order in which methods are listed."""
    if "colour" not in runs:
        return assigned(runs)
    methods = in_order(runs)
    looks = zip(methods["colour"], methods["is_dashed"], strict=True)
    return {name: Stroke(*look) for name, look in zip(methods["name"], looks, strict=True)}


def assigned(runs: DataFrame) -> dict[str, Stroke]:
    """Choose a stroke for each name: the usual colours for the usual optimizers, warm ones for curvature."""
    methods = in_order(runs)
    found: dict[str, Stroke] = {}
    used = {"curved": 0, "control": 0, "other": 0}
    for name, optimizer, rank, sketch in methods[["name", "optimizer", "rank", "sketch"]].itertuples(index=False):
        is_control = optimizer == "cao" and (rank == 0 or sketch in ("random", "projected-out"))
        if optimizer in PLAIN and PLAIN[optimizer] not in {stroke.colour for stroke in found.values()}:
            found[name] = Stroke(PLAIN[optimizer])
            continue
        kind = "control" if is_control or optimizer in PLAIN else "curved" if optimizer == "cao" else "other"
        colours = {"curved": CURVED, "control": CONTROLS, "other": OTHERS}[kind]
        found[name] = Stroke(colours[used[kind] % len(colours)], kind == "control" or used[kind] >= len(colours))
        used[kind] += 1
    return found

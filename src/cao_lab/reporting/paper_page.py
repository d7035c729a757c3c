"""The tables of docs/paper.md: each claim, figure and table of the paper, with its number and ours beside it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import PAPER_COSTS, PAPER_TASK, PAPER_THRESHOLDS, SUITES, suites_of
from cao_lab.protocol import EARLY_SHARE
from cao_lab.reporting.analysis import final_results
from cao_lab.reporting.judges.cost import cost_ratio
from cao_lab.reporting.paper_numbers import ACCURACIES, FIGURES, HITS, NUMBERS
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Verdict, bare, how_many, sooner

MARKS = {
    Verdict.HOLDS: "🟩 holds", Verdict.RATE: "🟨 by the rate", Verdict.TIE: "🟦 tie", Verdict.FAILS: "🟥 does not hold",
    Verdict.UNDECIDED: "⬜ undecided", Verdict.UNTESTABLE: "– not testable", Verdict.UNTESTED: "–",
}  # fmt: skip
"""Verdicts in colours, and in words for those who see none."""
SILENT = (Verdict.UNTESTED, Verdict.UNTESTABLE)
SIZES = ["paper", "narrow", "mini"]
"""Suites that ask the paper's question, the largest first."""
SMALL = "w8-n5000"
PLACES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "C100-R18, full size": (("paper", PAPER_TASK), ("sensitivity", PAPER_TASK)),
    "C100-R18, width 8": (("narrow", f"{PAPER_TASK}w8"),),
    "C10-R18, width 8": (("narrow", "cifar10-resnet18w8"),),
    "C100-R18, small": (("mini", PAPER_TASK + SMALL), ("mini-sensitivity", PAPER_TASK + SMALL)),
    "C10-R18, small": (("mini", f"cifar10-resnet18{SMALL}"),),
    "C10-R34, small": (("mini", f"cifar10-resnet34{SMALL}"),),
    "C100-R34, small": (("mini", f"cifar100-resnet34{SMALL}"),),
    "digits": (("digits-tuned", "digits-mlp"), ("stable-range", "digits-mlp")),
    "text": (("transformer", "pydoc-transformerw32"),),
}
"""Where claims are judged, the paper's own size first; small is width 8 and 5,000 images."""
TITLES = {"sgd": "SGD", "adam": "Adam", "cao": "CAO"}
SAYS = {
    Verdict.HOLDS: "CAO is faster, and not by its rate alone", Verdict.RATE: "CAO is faster, by its rate alone",
    Verdict.TIE: "they tie", Verdict.FAILS: "Adam is faster", Verdict.UNDECIDED: "the two are not told apart",
}  # fmt: skip


def paper_tables(found: list[Setting], verdicts: DataFrame, theory: DataFrame) -> dict[str, DataFrame]:
    """Return the tables of the page, by their marks."""
    sized = {task: at_every_size(found, task) for task in PAPER_COSTS}
    return {
        "paper-matrix": matrix(verdicts),
        "paper-claims": claims_table(found, verdicts),
        "paper-figures": figures_table(sized),
        "paper-accuracy": accuracy_table(sized),
        "paper-thresholds": thresholds_table(sized[PAPER_TASK]),
        "paper-cost": cost_table(sized),
        "paper-theory": theory_table(theory),
        "paper-progress": progress_table(found),
    }


def headline(found: list[Setting], verdicts: DataFrame) -> str:
    """Return what of the paper's factor has been tested, and what its comparison came to at each η."""
    own = verdicts[(verdicts["claim"] == "factor") & ~verdicts["verdict"].isin(SILENT)]
    lowest = min((float(one.epochs["train_loss"].min()) for one in sized_like_the_paper(found)), default=float("nan"))
    if own.empty:
        text = (
            f"**The paper's 2.95× itself has not been tested**: nobody has trained ResNet-18 of width 64 on all of "
            f"CIFAR-100 here, and in smaller runs nothing has come down to its train loss of "
            f"{PAPER_THRESHOLDS.primary:g} (the lowest of any is {lowest:.3g})."
        )
    else:
        told = "; ".join(f"{row.suite}, {row.part}: {row.verdict} ({row.evidence})" for row in own.itertuples())
        text = f"**The paper's 2.95×**: {told}."
    return " ".join([text, *spoken(verdicts)]) + "\n"


def sized_like_the_paper(found: list[Setting]) -> list[Setting]:
    """Return the settings of CIFAR-100 with ResNet-18 that are compared with the paper's."""
    return [one for one in found if one.suite in suites_of(["comparison"]) and one.task.startswith(PAPER_TASK)]


def spoken(verdicts: DataFrame) -> Iterable[str]:
    """Yield a sentence per size on how CAO and Adam compare at each η, with the control beside it."""
    own = verdicts[(verdicts["claim"] == "speed") & ~verdicts["verdict"].isin(SILENT)]
    for title, places in PLACES.items():
        rows = own[[place in places for place in zip(own["suite"], own["task"], strict=True)]]
        if rows.empty or not title.startswith("C100-R18"):
            continue
        pairs = zip(rows["part"], rows["verdict"], rows["evidence"], strict=True)
        told = [f"at {part} {SAYS[Verdict(verdict)]}{needs(evidence)}" for part, verdict, evidence in pairs]
        size = f"{title} (`cao suite {places[0][0]}`)"
        yield f"What has been tested is the comparison with Adam on {size}: {'; '.join(told)}."


def needs(evidence: str) -> str:
    """Return what Adam and the control need of CAO's epochs, from the evidence for a speed."""
    ratios = re.findall(r"needs ([\d.]+×(?: \[[^\]]*\]| without an interval))", evidence)
    who = ("Adam", "the control without curvature")
    told = [f"{one} needs {ratio}" for one, ratio in zip(who, ratios, strict=False)]
    return f" ({', '.join(told)} of CAO's epochs)" if told else ""


def matrix(verdicts: DataFrame) -> DataFrame:
    """Return claims × tasks in colours; where verdicts differ by η or part, each stands for itself."""
    rows = []
    for claim, own in verdicts.groupby("claim", sort=False):
        cells = {title: cell(own, places) for title, places in PLACES.items()}
        star = "" if own["is_counted"].all() else " \\*"
        rows.append({"claim": f"{claim}{star}"} | cells)
    return DataFrame(rows)


def cell(own: DataFrame, places: tuple[tuple[str, str], ...]) -> str:
    """Return what one column says of one claim."""
    rows = own[[place in places for place in zip(own["suite"], own["task"], strict=True)]]
    rows = rows[rows["verdict"] != Verdict.UNTESTED]
    parts = rows["part"].where(rows["part"] != "", rows["suite"])
    told = {part: MARKS[Verdict(verdict)] for part, verdict in zip(parts, rows["verdict"], strict=True)}
    if len(set(told.values())) <= 1:
        alike = next(iter(told.values()), "–")
        return f"{alike}, at {len(told)} η" if len(told) > 1 and all(part.startswith("η") for part in told) else alike
    return "<br>".join(f"{mark}: {part}" for part, mark in told.items())


def claims_table(found: list[Setting], verdicts: DataFrame) -> DataFrame:
    """Return each claim where it was judged at the largest size, at each η: number, verdict, command and log."""
    budgets = {(one.suite, one.task): f"{one.epochs['budget'].max():.0f} epochs" for one in found}
    return DataFrame([
        {
            "claim": row["claim"],
            "the paper says": "" if number else row["statement"],
            "its number": NUMBERS.get(row["claim"], "–"),
            "ours": shortened(row["evidence"]),
            "size": ", ".join(filter(None, (row["task"], budgets.get((row["suite"], row["task"]))))),
            "η, or part": row["part"] or "–",
            "verdict": MARKS[Verdict(row["verdict"])],
            "what would decide it": decides(row["verdict"], row["evidence"]),
            "command": f"`cao suite {row['suite']}`",
            "log": f"`logs/{row['suite']}/{row['task']}`" if (row["suite"], row["task"]) in budgets else "none",
        }
        for _, own in verdicts.groupby("claim", sort=False)
        for number, row in enumerate(at_largest_size(own).to_dict("records"))
    ])  # fmt: skip


def at_largest_size(own: DataFrame) -> DataFrame:
    """Return the rows of a claim where it has been judged nearest to the paper's size, else where it should be."""
    for places in PLACES.values():
        rows = own[[place in places for place in zip(own["suite"], own["task"], strict=True)]]
        if not rows["verdict"].isin(SILENT).all():
            return rows
    untestable = own[own["verdict"] == Verdict.UNTESTABLE]
    return untestable.drop_duplicates("suite").head(1) if len(untestable) else own.head(1)


def shortened(evidence: str) -> str:
    """Return the first comparison of the evidence, without what results.md tells besides."""
    first = evidence.split("; ", maxsplit=1)[0]
    return re.sub(r"(, noise [^)]*)?\)", ")", first, count=1) if "(n = " in first else first


def decides(verdict: str, evidence: str) -> str:
    """Return what would decide a claim that is not decided."""
    if verdict in SILENT:
        return "a run at the paper's size: `make paper`"
    if verdict != Verdict.UNDECIDED:
        return "–"
    return (
        ",".join(re.findall(r"[^;,]* takes \d+ (?:seeds|runs[^;]*)", evidence)).strip() or "more seeds, or less noise"
    )


def at_every_size(found: list[Setting], task: str) -> list[Setting]:
    """Return the settings of one of the paper's tasks that have ended runs, at every size, the largest first."""
    own = [one for one in found if one.suite in SIZES and re.fullmatch(rf"{task}(w\d+)?(-n\d+)?", one.task)]
    return sorted((one for one in own if one.labels), key=lambda one: SIZES.index(one.suite))


def arms_of(setting: Setting) -> Iterable[tuple[str, Setting]]:
    """Yield a setting at each η, with how that is called; without CAO it is there once."""
    for name, one in setting.arms.items():
        yield name or "–", one


def figures_table(sized: Mapping[str, list[Setting]]) -> DataFrame:
    """Return each figure of the paper beside where our curves of the same methods end."""
    rows = []
    for number, shown, task, kind in FIGURES:
        parts = ("rank0-unit", "rank0-inverse", "cao", "rank3", "rank5") if kind == "rank-ablation" else tuple(TITLES)
        rows += [
            {
                "figure": number,
                "in the paper": shown,
                "ours, where it ends": ends(one, parts, kind),
                "size": size(one),
                "drawn by `cao report logs`": f"`figures/{one.suite}/{drawn_as(one, kind)}.png`",
            }
            for one in sized[task]
        ]
    return DataFrame(rows)


def drawn_as(setting: Setting, kind: str) -> str:
    """Return the name of a figure in the report."""
    return SUITES[setting.suite].figures.get((setting.task, kind), f"{setting.task}/{kind}")


def ends(setting: Setting, parts: Iterable[str], kind: str) -> str:
    """Return where the curves of a figure end, with the number of seeds; the early ones at 40 % of the budget."""
    column = "train_accuracy" if kind == "train-accuracy" else "train_loss"
    if kind.endswith("early"):
        rows = setting.epochs
        setting = replace(setting, epochs=rows[rows["epoch"] <= np.ceil(EARLY_SHARE * rows["budget"])])
    told = [f"{setting.name(part)} {value(setting, part, column)}" for part in parts if part in setting.labels]
    return "; ".join(told) or "no ended runs"


def value(setting: Setting, part: str, column: str) -> str:
    """Return mean ± standard deviation of a final value of one part, and of how many seeds."""
    ended = final_results(setting.of(part))[column].dropna() if part in setting.labels else Series(dtype=float)
    if ended.empty:
        return "–"
    std = f" ± {ended.std():.3f}" if len(ended) > 1 else ""
    return f"{ended.mean():.3f}{std} (n = {len(ended)})"


def size(setting: Setting) -> str:
    """Return the suite, the task and the budget of a setting."""
    return f"`{setting.suite}`, {setting.task}, {setting.epochs['budget'].max():.0f} epochs"


def accuracy_table(sized: Mapping[str, list[Setting]]) -> DataFrame:
    """Return the paper's Table 1, and below each of its rows ours, at every size and η."""
    rows = []
    for task, of_paper in ACCURACIES.items():
        rows.append(dict(zip(("setting", *TITLES.values()), (f"{task}, the paper", *of_paper), strict=True)))
        for one in sized[task]:
            for name, arm in arms_of(one):
                own = (value(arm, part, "test_accuracy") for part in TITLES)
                rows.append(dict(zip(("setting", *TITLES.values()), (f"{size(one)}, {name}", *own), strict=True)))
    return DataFrame(rows)


def thresholds_table(settings: list[Setting]) -> DataFrame:
    """Return the paper's Table 2, and ours at the declared thresholds, at every size and η."""
    columns = ("setting", "train loss", "Adam, epochs", "CAO, epochs", "Adam/CAO")
    rows: list[tuple[str, ...]] = [("the paper", f"{level:g}", *told) for level, told in HITS.items()]
    for one in settings:
        levels = one.thresholds.sweep if one.thresholds else ()
        for name, arm in arms_of(one):
            if arm.lacking("adam", "cao"):
                continue
            for level in levels:
                ratio, note = sooner(arm, "adam", "cao", level)
                if not ratio.count:
                    continue
                told = f"{bare(ratio)} ({how_many(ratio)}){' a bound' if note else ''}"
                reached = [arrived(arm, part, level) for part in ("adam", "cao")]
                rows.append((f"{size(one)}, {name}", f"{level:g}", *reached, told))
    return DataFrame(rows, columns=list(columns))


def arrived(setting: Setting, part: str, level: float) -> str:
    """Return the mean first epoch at or below a loss, and on how many seeds it was reached."""
    hits = setting.hits(level)
    epochs = hits.loc[hits["label"] == setting.labels[part], "epoch"]
    reached = epochs.dropna()
    if reached.empty:
        return f"not reached (0 of {len(epochs)})"
    note = "" if len(reached) == len(epochs) else f" ({len(reached)} of {len(epochs)})"
    return f"{reached.mean():.1f}{f' ± {reached.std():.1f}' if len(reached) > 1 else ''}{note}"


def cost_table(sized: Mapping[str, list[Setting]]) -> DataFrame:
    """Return the paper's Table 3 as ratios to SGD, and ours as they were run."""
    rows = []
    for task, (sgd, cao) in PAPER_COSTS.items():
        time, memory = (f"{cao[unit] / sgd[unit]:.2f}×" for unit in ("seconds", "memory"))
        rows.append((f"{task}, the paper", "400", time, memory))
        for one in sized[task]:
            if not one.lacking("cao", "sgd"):
                ratios = [cost_ratio(one, unit) for unit in ("seconds_per_epoch", "peak_memory_mib")]
                source = "" if (one.epochs["peak_memory_source"] == "cuda").all() else ", of the process"
                every = f"{one.of('cao')['refresh_every'].iloc[0]:.0f}"
                rows.append((size(one), every, bare(ratios[0]), bare(ratios[1]) + source))
    return DataFrame(
        rows, columns=["setting", "a refresh every", "seconds of an epoch, CAO/SGD", "peak memory, CAO/SGD"]
    )


def theory_table(theory: DataFrame) -> DataFrame:
    """Return the statements of the paper's theory as it prints them, each checked by numbers."""
    if theory.empty:
        return theory
    rows = theory[theory["statement"].str.match(r"Printed|Lemma \d:")]
    return DataFrame({"statement": rows["statement"], "checked on": rows["problem"], "found": rows["verdict"]})


def progress_table(found: list[Setting]) -> DataFrame:
    """Return how far the suites of the paper's claims have come: runs that ended, and those that have not."""
    rows = []
    for one in found:
        if one.kind not in ("comparison", "sweep", "stability"):
            continue
        runs = one.epochs.drop_duplicates("run", keep="last")
        going = runs[~runs["has_ended"]]
        under_way = "; ".join(
            f"{row.name_}, seed {row.seed:.0f}: epoch {row.epoch:.0f} of {row.budget:.0f}, loss {row.train_loss:.3g}"
            for row in going.rename(columns={"name": "name_"}).itertuples()
        )
        rows.append((one.suite, one.task, str(int(runs["has_ended"].sum())), under_way or "–"))
    return DataFrame(rows, columns=["suite", "task", "runs ended", "not ended, not judged"])

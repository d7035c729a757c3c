"""The tables of docs/results.md and docs/paper.md, made from logs: the document is held to them word for word.

Each stands there below a mark, `<!-- table NAME -->`, and `scripts/fill_documents.py` puts it there.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from pandas import DataFrame, Series

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import final_results, run_costs, sensitivity
from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.names import MIXED, method_name
from cao_lab.reporting.paper_page import headline, paper_tables
from cao_lab.reporting.rates import effective_rate, stable_windows
from cao_lab.reporting.report import load_beside
from cao_lab.reporting.setting import Setting, settings
from cao_lab.reporting.tabular import captioned, markdown
from cao_lab.reporting.verdicts import Verdict

MAIN = ("mini", "cifar100-resnet18w8-n5000")
AGAIN = ("mini-again", MAIN[1])
NETWORKS = {"cifar10-resnet18": "CIFAR-10, ResNet-18", "cifar10-resnet34": "CIFAR-10, ResNet-34",
            "cifar100-resnet34": "CIFAR-100, ResNet-34"}  # fmt: skip
SWEEPS = ("damping", "damping and variance", "small damping", "refresh")
STEPS = "steps, in brackets gradient evaluations"


def tables_of(logs: Path) -> dict[str, str]:
    """Return all tables that a page may name, as Markdown: the report's own, and those made for pages."""
    read = load_logs(logs)
    found = settings(read)
    beside = {table.name: captioned(table) for table in load_beside(logs, []).tables()}
    return beside | document_tables(found, audit(found), read.theory)


def document_tables(found: list[Setting], verdicts: DataFrame, theory: DataFrame) -> dict[str, str]:
    """Return each table of the document as Markdown, by its mark; those whose runs are not there are left out."""
    by_place = {(one.suite, one.task): one for one in found}
    tables = {"verdicts": verdict_table(verdicts)}
    if MAIN in by_place:
        tables |= {"mini": methods_table(by_place[MAIN]), "mini-cost": cost_table(by_place[MAIN])}
    if MAIN in by_place and AGAIN in by_place:
        tables["mini-again"] = repeated_table(by_place[MAIN], by_place[AGAIN])
    tables |= {one.suite: tuned_table(one) for one in found if one.kind == "tuned"}
    tables |= {one.suite: swept_table(one) for one in found if one.kind == "sweep"}
    tables |= {"networks": networks_table(by_place), "networks-verdicts": networks_verdicts(verdicts)}
    tables["stable-range"] = stable_table([one for one in found if one.kind == "stability"])
    tables["ill-conditioned"] = optimum_table([one for one in found if one.kind == "optimum"])
    tables |= paper_tables(found, verdicts, theory)
    texts = {name: markdown(cells) for name, cells in tables.items() if len(cells)}
    return texts | {"paper-headline": headline(found, verdicts)}


def counted(verdicts: DataFrame) -> dict[str, int]:
    """Return how many of the paper's claims have which verdict in the main setting, at the usual η."""
    own = verdicts[(verdicts["suite"] == MAIN[0]) & (verdicts["task"] == MAIN[1]) & verdicts["is_counted"]]
    return {
        str(verdict): int(count) for verdict, count in own.drop_duplicates("claim")["verdict"].value_counts().items()
    }


def verdict_table(verdicts: DataFrame) -> DataFrame:
    """Return what the main setting says of each claim, the searches for stable rates, and the sweeps."""
    is_main = (verdicts["suite"] == MAIN[0]) & (verdicts["task"] == MAIN[1])
    is_other = (verdicts["claim"] == "stable range") | verdicts["claim"].isin(SWEEPS)
    is_other |= (verdicts["claim"] == "stability") & (verdicts["task"] == MAIN[1])
    rows = verdicts[is_main | is_other]
    places = (rows["suite"] + ", " + rows["task"]).where(~is_main, "")
    inside = [", ".join(filter(None, both)) for both in zip(rows["part"], places, strict=False)]
    names = [f"{claim} ({where})" if where else claim for claim, where in zip(rows["claim"], inside, strict=True)]
    bold = rows["verdict"].map(lambda verdict: f"**{verdict}**" if "hold" in verdict else verdict)
    told = {"the paper says": rows["statement"], "verdict": bold, "evidence": rows["evidence"]}
    return DataFrame({"claim": names} | told)


def methods_table(setting: Setting) -> DataFrame:
    """Return where every method ended, the lowest train loss first, and when it came to the threshold."""
    assert setting.thresholds is not None
    level, rows = setting.thresholds.primary, []
    for label, finals in in_order_of_loss(setting):
        rows.append({
            "": setting.names[label],
            "final train loss": spread(finals["train_loss"], 3),
            "test accuracy, %": spread(100 * finals["test_accuracy"], 1),
            f"epochs to {level:g}": arrival(setting, label, level),
        })  # fmt: skip
    return DataFrame(rows)


def cost_table(setting: Setting) -> DataFrame:
    """Return what the paper's three methods spent to come to the threshold."""
    assert setting.thresholds is not None
    hits = setting.hits(setting.thresholds.primary)
    evaluations = f"gradient evaluations, a product counted as {setting.prices['hessian']:.1f}"
    rows = []
    for part in ("sgd", "adam", "cao"):
        own = hits[hits["label"] == setting.labels[part]]
        spent = {"seconds": spread(own["seconds"], 0), evaluations: spread(own["gradient_cost"], 0)}
        rows.append({f"to {setting.thresholds.primary:g}": setting.name(part), **spent})
    return DataFrame(rows)


def networks_table(by_place: Mapping[tuple[str, str], Setting]) -> DataFrame:
    """Return where the paper's three methods ended on the other networks and data, and when they arrived."""
    rows = []
    for task, title in NETWORKS.items():
        if (setting := by_place.get((MAIN[0], f"{task}w8-n5000"))) is None:
            continue
        assert setting.thresholds is not None
        level = setting.thresholds.primary
        for part in ("adam", "sgd", "cao"):
            finals = final_results(setting.of(part))
            rows.append({
                "": title,
                "method": setting.name(part),
                "final train loss": spread(finals["train_loss"], 3),
                "test accuracy, %": spread(100 * finals["test_accuracy"], 1),
                "epochs to three quarters of ln(classes)": arrival(setting, setting.labels[part], level),
            })  # fmt: skip
    return DataFrame(rows)


def networks_verdicts(verdicts: DataFrame) -> DataFrame:
    """Return the verdicts on the other networks, at the usual η, of the claims that were tested on one of them."""
    own = verdicts[verdicts["suite"] == MAIN[0]].assign(network=verdicts["task"].str.removesuffix("w8-n5000"))
    own = own[own["network"].isin(NETWORKS)]
    tested = own.loc[own["verdict"] != Verdict.UNTESTED, "claim"].unique()
    own = own.drop_duplicates(["claim", "network"])
    return DataFrame([
        {"claim": claim}
        | {NETWORKS[row.network]: str(row.verdict) for row in own[own["claim"] == claim].itertuples()}
        for claim in tested
    ])  # fmt: skip


def repeated_table(old: Setting, new: Setting) -> DataFrame:
    """Return what became of runs that were made once more on later code: where they ended, and how far apart."""
    rows = []
    finals = [final_results(one.epochs).set_index(["label", "seed"]) for one in (old, new)]
    for label, name in new.names.items():
        before, after = (one.loc[label] for one in finals)
        change = (after["train_loss"] - before["train_loss"]).dropna()
        points = 100 * (after["test_accuracy"] - before["test_accuracy"]).dropna()
        rows.append({
            "": name,
            "train loss before": spread(before["train_loss"], 3),
            "now": spread(after["train_loss"], 3),
            "change": spread(change, 3),
            "largest on a seed": f"{change.abs().max():.3f}",
            "accuracy, points": spread(points, 1),
        })  # fmt: skip
    return DataFrame(rows)


def tuned_table(setting: Setting) -> DataFrame:
    """Return every method at its best rate on fresh seeds: where it ended, when it arrived, what it cost."""
    rows, costs = [], run_costs(setting.best).groupby("label")["seconds_per_epoch"]
    spent = setting.ended.drop_duplicates("run", keep="last").groupby("label")["gradient_cost"].mean()
    level, easier = two_levels(setting)
    for label, finals in in_order_of_loss(setting):
        first = setting.by_label[label].iloc[0]
        rows.append({
            "": method_name(first),
            "best rate": f"{first['base_lr']:.2g}",
            "effective": long_run_rate(setting.by_label[label]),
            "final train loss": spread(finals["train_loss"], 3),
            "test accuracy, %": spread(100 * finals["test_accuracy"], 1),
            f"epochs to {level:g}": arrival(setting, label, level),
            f"to {easier:g}": arrival(setting, label, easier),
            "gradient evaluations": f"{spent[label]:.0f}",
            "seconds an epoch": seconds(costs.get_group(label)),
        })  # fmt: skip
    return DataFrame(rows)


def two_levels(setting: Setting) -> tuple[float, float]:
    """Return the declared threshold, and the next easier one for those that do not reach it."""
    assert setting.thresholds is not None
    level = setting.thresholds.primary
    return level, min(one for one in setting.thresholds.sweep if one > level)


def long_run_rate(epochs: DataFrame) -> str:
    """Return the rate α/(η(1 − β)) at which a gradient that stays the same moves the complement, where there is one."""
    first = epochs.iloc[[0]]
    if not method_info(first["optimizer"].iloc[0]).has_edge:
        return "–"
    return f"{(effective_rate(first) / (1 - first['momentum'].fillna(0))).iloc[0]:.2g}"


def swept_table(setting: Setting) -> DataFrame:
    """Return what became of each pair of damping and refresh interval, and of rank 0, which never refreshes."""
    assert setting.goal is not None
    cells = sensitivity(setting.epochs, setting.goal.hits)
    rows = []
    for (rank, damping, interval), own in cells.groupby(["rank", "damping", "refresh_every"]):
        label = own["label"].iloc[0]
        rows.append({
            "k": f"{rank:.0f}",
            "η": f"{damping:g}",
            "m": f"{interval:.0f}" if rank else "–",
            "effective rate α/η": long_run_rate(setting.by_label[label]),
            f"epochs to {setting.goal.loss:g}": arrival(setting, label, setting.goal.loss),
            "final train loss": spread(own["train_loss"], 3),
            "test accuracy, %": spread(100 * own["test_accuracy"], 1),
            "diverged": f"{(own['status'] == 'diverged').sum()} of {len(own)}",
            "seconds an epoch": seconds(own["seconds_per_epoch"]),
        })  # fmt: skip
    return DataFrame(rows)


def stable_table(found: list[Setting]) -> DataFrame:
    """Return the largest rate that works of each method and seed, and in brackets the next that was tried and fails."""
    rows = []
    for one in found:
        windows = stable_windows(one.epochs)
        for seed, own in windows.groupby("seed"):
            in_order = own.sort_values(["rank", "optimizer"], na_position="first")
            # A column is shared by seeds and tasks, so that the mark of one goes with its cell.
            cells = {
                method_name(row.drop("is_mixed")): window(row) + (f" {MIXED}" if row["is_mixed"] else "")
                for _, row in in_order.iterrows()
            }
            rows.append({"task": one.task, "seed": str(seed), **cells})
    return DataFrame(rows)


def window(row: Series) -> str:
    """Return one bracket of a search."""
    works = "none" if math.isnan(row["largest_stable"]) else f"{row['largest_stable']:.2f}"
    return works if math.isnan(row["smallest_unstable"]) else f"{works} ({row['smallest_unstable']:.2f})"


def optimum_table(found: list[Setting]) -> DataFrame:
    """Return steps to within 10⁻³ of the optimum, at each method's best rate; of L-BFGS gradient evaluations alone."""
    rows = []
    for one in found:
        assert one.thresholds is not None
        hits = one.hits(one.thresholds.primary)
        hits = hits[hits["label"].isin(one.best["label"].unique())]
        told = one.best.drop_duplicates("label").sort_values(["rank", "optimizer"], na_position="first")
        cells = {method_name(row): steps(row, hits) for _, row in told.iterrows()}
        rows.append({STEPS: one.task.split("-linear")[0].split("-full")[0], **cells})
    return DataFrame(rows)


def steps(method: Series, hits: DataFrame) -> str:
    """Return how many steps a method took on its seed, and what they cost."""
    own = hits[hits["label"] == method["label"]].iloc[0]
    if math.isnan(own["epoch"]):
        return "diverged" if method["status"] == "diverged" else f"not in {own['budget']:.0f}"
    cost = f"({own['gradient_cost']:.0f})"
    # A step of L-BFGS is ten iterations, and compares with nobody's.
    return f"{own['epoch']:.0f} {cost}" if method_info(str(method["optimizer"])).has_epochs else cost


def in_order_of_loss(setting: Setting) -> Iterable[tuple[str, DataFrame]]:
    """Yield the final results of each method at its best, the lowest mean train loss first; who diverged comes last."""
    finals = final_results(setting.best)
    means = finals.groupby("label")["train_loss"].agg(lambda losses: losses.mean(skipna=False)).sort_values()
    for label in means.index:
        yield str(label), finals[finals["label"] == label]


def arrival(setting: Setting, label: str, level: float) -> str:
    """Return when the seeds of a method reached a threshold, and how many did if not all."""
    hits = setting.hits(level)
    own = hits.loc[hits["label"] == label, "epoch"]
    reached = own.dropna()
    if reached.empty:
        return "not reached"
    note = "" if len(reached) == len(own) else f" ({len(reached)} of {len(own)} seeds)"
    return spread(reached, 1) + note


def spread(values: Series, digits: int) -> str:
    """Return "mean ± std", the mean alone of a single value; and of how many seeds, if some diverged."""
    kept = values.dropna()
    if kept.empty:
        return "–"
    std = f" ± {kept.std():.{digits}f}" if len(kept) > 1 else ""
    note = "" if len(kept) == len(values) else f" ({len(kept)} of {len(values)} seeds)"
    return f"{kept.mean():.{digits}f}{std}{note}"


def seconds(values: Series) -> str:
    """Return seconds with a digit behind the point, or three below one second."""
    return spread(values, 1 if values.mean() >= 1 else 3)

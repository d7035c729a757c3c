"""The report's tables, one function each: what is compared, over which seeds, and who never arrived."""

import math
from collections.abc import Callable
from dataclasses import replace

from pandas import DataFrame, Series, concat

from cao_lab.facts import SEARCHING, suites_of
from cao_lab.protocol import without_tuning
from cao_lab.reporting.analysis import (
    LABEL_KEY,
    TASK_KEY,
    cost_ratios,
    final_results,
    mean_and_std,
    run_costs,
    sensitivity,
    time_to_threshold,
)
from cao_lab.reporting.logreader import Logs
from cao_lab.reporting.names import MIXED, method_name
from cao_lab.reporting.rates import predicted_windows
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.tabular import NOT_REACHED, Table, ratio, spread

WITHOUT_ACCURACY = ("stability", "optimum")
"""Kinds of suites that ask for rates or for steps; their final accuracy answers nothing."""


def expected_seeds(runs: DataFrame) -> Series:
    """Return how many seeds each label should have: as many as any label of its task, where none is a search."""
    own = runs.groupby(LABEL_KEY)["seed"].transform("nunique")
    return own.where(
        runs["suite"].isin(suites_of(SEARCHING)), own.groupby([runs[key] for key in TASK_KEY]).transform("max")
    )


def named(logs: Logs, numbers: DataFrame) -> DataFrame:
    """Put a method's name and its expected number of seeds beside its label."""
    labels = logs.runs.assign(expected=expected_seeds(logs.runs)).drop_duplicates(LABEL_KEY)
    return numbers.merge(labels[[*LABEL_KEY, "name", "expected"]], on=LABEL_KEY) if len(numbers) else numbers


def stacked(frames: list[DataFrame]) -> DataFrame:
    """Return frames below each other; none gives an empty frame."""
    return concat(frames, ignore_index=True) if frames else DataFrame()


def heading(row: Series) -> dict[str, str]:
    """Return the cells that say whose row it is."""
    return {"Suite": row["suite"], "Task": row["task"], "Optimizer": row["name"]}


def final_mean(row: Series, prefix: str = "") -> str:
    """Return the mean of a final value; where no run has one it says so."""
    if not row[f"{prefix}count"]:
        return f"none finished (0 of {row['expected']} seeds)"
    return spread(row[f"{prefix}mean"], row[f"{prefix}std"], row[f"{prefix}count"], row["expected"], digits=4)


def paper_accuracy_table(logs: Logs, found: list[Setting]) -> Table:
    """Return the paper's table of final test accuracy: a row a setting, its three optimizers as columns."""
    numbers = named(logs, mean_and_std(final_results(logs.epochs), "test_accuracy"))
    cells = {(row["suite"], row["task"], row["label"]): final_mean(row) for _, row in numbers.iterrows()}
    rows = []
    for one in found:
        played = [cells.get((one.suite, one.task, one.labels.get(part, "")), "–") for part in ("sgd", "adam", "cao")]
        if one.kind not in WITHOUT_ACCURACY and played != ["–"] * 3 and one.epochs["test_accuracy"].notna().any():
            rows.append([one.suite, one.task, *played])
    columns = ["Suite", "Task", "SGD", "Adam", "CAO (k=1)"]
    caption = "Final test accuracy, mean ± std over seeds († single seed)."
    return Table("final-accuracy", caption, DataFrame(rows, columns=columns), numbers)


def results_table(logs: Logs, found: list[Setting]) -> Table:
    """Return where every method ended: test accuracy, train loss, and how many of its runs diverged."""
    finals = final_results(logs.epochs)
    losses = mean_and_std(finals, "train_loss").rename(
        columns=lambda name: f"loss_{name}" if name in STATISTICS else name
    )
    numbers = named(logs, mean_and_std(finals, "test_accuracy").merge(losses, on=LABEL_KEY))
    counted = finals.assign(diverged=finals["status"] == "diverged").groupby(LABEL_KEY)["diverged"].sum()
    numbers = numbers.merge(counted.reset_index(), on=LABEL_KEY) if len(numbers) else numbers
    has_accuracy = {(one.suite, one.task): one.epochs["test_accuracy"].notna().any() for one in found}
    cells = [
        heading(row)
        | {"Test accuracy": final_mean(row) if has_accuracy[row["suite"], row["task"]] else "–"}
        | {"Train loss": final_mean(row, "loss_")}
        | {"Diverged": f"{row['diverged']} of {row['seeds']}" if row["diverged"] else "none"}
        for _, row in numbers.iterrows()
    ]
    return Table(
        "results", "Where every method ended, mean ± std over seeds († single seed).", DataFrame(cells), numbers
    )


STATISTICS = ("mean", "std", "count", "seeds")


def threshold_table(logs: Logs, found: list[Setting]) -> Table:
    """Return epochs, seconds and gradient evaluations to each task's declared threshold, for every method."""
    frames = [hits_summary(one, one.thresholds.primary) for one in found if one.thresholds is not None]
    numbers = named(logs, stacked(frames))
    caption = (
        "Time to the declared train loss, mean ± std over the seeds that reached it († single seed). Speedup: "
        "ratio of the geometric means of Adam's crossings and the method's, with Welch's interval at 95 %."
    )
    cells = [threshold_cells(row) for _, row in numbers.iterrows()]
    return Table("time-to-threshold", caption, DataFrame(cells), numbers)


def hits_summary(setting: Setting, threshold: float) -> DataFrame:
    """Return the times to one threshold in one task, with the speedup over Adam."""
    found = time_to_threshold(setting.hits(threshold), setting.labels.get("adam"))
    return found.drop(columns="threshold").assign(threshold=threshold)


def threshold_cells(row: Series) -> dict[str, str]:
    """Return one row of the table of times to a threshold."""
    count, seeds = row["reached"], max(row["expected"], row["seeds"])

    def time(unit: str, digits: int) -> str:
        return spread(row[f"{unit}_mean"], row[f"{unit}_std"], count, seeds, digits) if count else "–"

    return heading(row) | {
        "Threshold": f"{row['threshold']:.4g}",
        "Epochs": spread(row["epoch_mean"], row["epoch_std"], count, seeds),
        "Seconds": time("seconds", 1),
        "Gradient evaluations": time("gradient_cost", 0),
        "Speedup, epochs": ratio(*(row[f"epoch_speedup{end}"] for end in ("", "_low", "_high"))),
        "Speedup, seconds": ratio(*(row[f"seconds_speedup{end}"] for end in ("", "_low", "_high"))),
    }


def sweep_table(logs: Logs, found: list[Setting]) -> Table:
    """Return epochs to every declared threshold, and the speedup over Adam at each."""
    frames = [hits_summary(one, level) for one in found if one.thresholds for level in one.thresholds.sweep]
    numbers = named(logs, stacked(frames))
    if len(numbers):
        order = [True, True, True, False]
        numbers = numbers.sort_values([*LABEL_KEY, "threshold"], ascending=order, ignore_index=True)
    hidden = ("Seconds", "Gradient evaluations", "Speedup, seconds")
    cells = DataFrame([threshold_cells(row) for _, row in numbers.iterrows()]).drop(
        columns=list(hidden), errors="ignore"
    )
    caption = "Epochs to every declared threshold, and the speedup over Adam at each († single seed)."
    return Table("threshold-sweep", caption, cells, numbers)


def cost_table(logs: Logs, found: list[Setting]) -> Table:
    """Return seconds an epoch and peak memory, absolute and relative to SGD of the same suite."""
    numbers = named(logs, stacked([cost_ratios(run_costs(one.epochs), one.labels.get("sgd")) for one in found]))
    cells = [
        heading(row)
        | {"Seconds an epoch": cost_cell(row, "seconds_per_epoch", 2)}
        | {"Time to SGD's": ratio(*(row[f"seconds_per_epoch_ratio{end}"] for end in ("", "_low", "_high")))}
        | {"Peak MiB": cost_cell(row, "peak_memory_mib", 0)}
        | {"Memory to SGD's": ratio(*(row[f"peak_memory_mib_ratio{end}"] for end in ("", "_low", "_high")))}
        | {"Memory of": str(row["peak_memory_source"])}
        for _, row in numbers.iterrows()
    ]
    caption = "Mean seconds an epoch and peak memory, and their ratios to SGD with Welch's interval at 95 %."
    return Table("cost", caption, DataFrame(cells), numbers)


def cost_cell(row: Series, unit: str, digits: int) -> str:
    """Return the mean of a cost over seeds."""
    return spread(row[unit], row[f"{unit}_std"], row["seeds"], row["expected"], digits)


def sensitivity_table(logs: Logs, found: list[Setting]) -> Table:
    """Return epochs to threshold and final accuracy over damping × refresh interval."""
    swept = [(one, one.thresholds.primary) for one in found if one.kind == "sweep" and one.thresholds]
    numbers = stacked([sensitivity(one.epochs, one.hits(level)).assign(threshold=level) for one, level in swept])
    cells = [
        {
            "Suite": row["suite"],
            "Task": row["task"],
            "Rank": f"{row['rank']:.0f}",
            "Damping η": f"{row['damping']:g}",
            "Refresh every": f"{row['refresh_every']:.0f}" if row["rank"] else "–",
            "Seed": str(row["seed"]),
            "Threshold": f"{row['threshold']:.4g}",
            "Epochs": NOT_REACHED if math.isnan(row["epoch"]) else f"{row['epoch']:.0f}",
            "Test accuracy": "diverged" if row["status"] == "diverged" else f"{row['test_accuracy']:.4f}",
            "Seconds an epoch": f"{row['seconds_per_epoch']:.2f}",
        }
        for _, row in numbers.iterrows()
    ]
    return Table("sensitivity", "Sensitivity to damping and refresh interval, run by run.", DataFrame(cells), numbers)


def stable_table(logs: Logs, found: list[Setting]) -> Table:
    """Return the largest effective rate at which each method still trains."""
    numbers = predicted_windows(logs.epochs, logs.refreshes)
    columns = {
        "Largest rate that works": "largest_stable",
        "Next rate that fails": "smallest_unstable",
        "Predicted at the start": "predicted_first",
        "Predicted over the run": "predicted_median",
    }
    cells = [
        {
            "Task": row["task"],
            "Method": method_name(row),
            "Seed": str(row["seed"]),
            **{name: "none" if math.isnan(row[key]) else f"{row[key]:.3g}" for name, key in columns.items()},
            "Rates tried": str(row["trials"]),
        }
        for _, row in numbers.iterrows()
    ]
    caption = (
        "Stable effective learning rates α/η, by bisection, beside the largest that is stable on a quadratic with the "
        "eigenvalues logged at the largest rate that works."
    )
    return Table("stable-range", caption, DataFrame(cells), numbers)


TABLES: tuple[Callable[[Logs, list[Setting]], Table], ...] = (
    paper_accuracy_table, results_table, threshold_table, sweep_table, cost_table, sensitivity_table, stable_table,
)  # fmt: skip


def make_tables(logs: Logs, found: list[Setting]) -> list[Table]:
    """Return every table that the logs have rows for; as in the audit, a run that chose a rate does not count."""
    judged = replace(logs, runs=without_tuning(logs.runs), epochs=without_tuning(logs.epochs))
    return [explained(table) for make in TABLES if not (table := make(judged, found)).cells.empty]


def explained(table: Table) -> Table:
    """Say below a table what its mark means, where one of its methods bears it."""
    is_marked = table.cells.map(lambda cell: MIXED in str(cell)).to_numpy().any()
    note = f" {MIXED} A run of this method was resumed on other code than it began with."
    return replace(table, caption=table.caption + note) if is_marked else table

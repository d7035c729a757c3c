"""What a report is about: the runs of one task in one suite, who plays which part, and when each reached what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from typing import TypeVar

from pandas import DataFrame, concat

from cao_lab.facts import REPEATING, SEARCHING, SUITES, SuiteKind, Thresholds, kind_of
from cao_lab.protocol import arms, final_train_losses, fresh, parts, representative, thresholds_of, without_tuning
from cao_lab.reporting.analysis import TASK_KEY, Goal, ended_with_costs, first_epoch_below, product_prices
from cao_lab.reporting.logreader import Logs
from cao_lab.reporting.palette import coloured
from cao_lab.reporting.rates import effective_rate

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Setting:
    """The runs of one task in one suite, and who plays which part among them."""

    suite: str
    task: str
    epochs: DataFrame
    refreshes: DataFrame
    thresholds: Thresholds | None
    labels: dict[str, str]
    names: dict[str, str]
    prices: dict[str, float]
    bench: dict[str, float]
    """What `cao bench` measured, by row."""
    repeats: tuple["Setting", ...] = ()
    """The same task in other suites with the same budget, where some of these runs were made once more."""

    @property
    def kind(self) -> SuiteKind | None:
        """What the suite asks."""
        return kind_of(self.suite)

    @cached_property
    def by_label(self) -> dict[str, DataFrame]:
        """The epochs of each label."""
        return {str(label): epochs for label, epochs in self.epochs.groupby("label")}

    def of(self, part: str) -> DataFrame:
        """Return the epochs of one part, none if nobody plays it."""
        return self.by_label.get(self.labels.get(part, ""), self.epochs[:0])

    def lacking(self, *names: str) -> list[str]:
        """Return the parts among these that nobody plays."""
        return [name for name in names if name not in self.labels]

    def name(self, part: str) -> str:
        """Return what to call the method that plays a part."""
        return self.names[self.labels[part]]

    def twice(self, measure: Callable[["Setting"], Mapping[str, Measured]]) -> list[tuple[Measured, Measured]]:
        """Return what one method was measured at twice: under two labels, or in two suites.

        `measure` gives something for each label of a setting. What the two differ by is the noise of rounding, grown by
        training: runs in other suites were made with other versions of the code.
        """
        own = measure(self)
        pairs = [(own[self.twins[0]], own[self.twins[1]])] if self.twins else []
        for other in map(measure, self.repeats):
            pairs += [(own[label], other[label]) for label in sorted(own.keys() & other.keys())]
        return pairs

    @cached_property
    def twins(self) -> tuple[str, str] | None:
        """Two labels of one method, if both were run: SGD at CAO's effective rate, and rank 0 in the text's form.

        They are the same iteration. Where each was tuned they may have come to different rates, and are not the same
        any more.
        """
        one, same = self.labels.get("matched"), self.labels.get("rank0-inverse")
        if one is None or same is None or one == same:
            return None
        rates = effective_rate(concat([self.by_label[label].head(1) for label in (one, same)]))
        return (one, same) if isclose(*rates, rel_tol=1e-2) else None

    @cached_property
    def arms(self) -> dict[str, "Setting"]:
        """This setting at each damping and clip of CAO, by name, the usual one first; alone where there is no CAO.

        At other dampings Adam and SGD are the same, and the controls are those of that damping. Runs that are in
        another suite of this task and budget alone are taken from there.
        """
        epochs, names = self.epochs, dict(self.names)
        for one in self.repeats:
            epochs = concat([epochs, one.epochs[~one.epochs["label"].isin(epochs["label"].unique())]])
            names = one.names | names
        pooled = replace(self, epochs=epochs, names=names)
        runs = ended_runs(pooled.epochs)
        found = arms(runs, self.suite)
        return {one.name: replace(pooled, labels=parts(runs, self.suite, one)) for one in found} or {"": self}

    @cached_property
    def best(self) -> DataFrame:
        """The epochs of each method at its best rate, all of them where no rates were searched."""
        if self.kind not in SEARCHING:
            return self.epochs
        runs = self.epochs.drop_duplicates("run").set_index("run")
        runs = runs.assign(final_train_loss=final_train_losses(self.epochs))
        kinds = runs.groupby(["optimizer", "rank", "momentum", "damping"], dropna=False)
        return self.epochs[self.epochs["label"].isin([representative(runs) for _, runs in kinds])]

    @cached_property
    def ended(self) -> DataFrame:
        """The epochs of ended runs with what each cost."""
        return ended_with_costs(self.epochs, self.prices)

    @cached_property
    def known_hits(self) -> dict[float, DataFrame]:
        """What `hits` has worked out so far."""
        return {}

    def hits(self, *thresholds: float) -> DataFrame:
        """Return when each ended run first reached each threshold, worked out once."""
        if unknown := [one for one in thresholds if one not in self.known_hits]:
            found = first_epoch_below(self.ended, unknown)
            self.known_hits.update({one: found[found["threshold"] == one] for one in unknown})
        return concat([self.known_hits[one] for one in thresholds], ignore_index=True)

    @property
    def goal(self) -> Goal | None:
        """The primary threshold and when each run reached it, None where no threshold was declared."""
        return None if self.thresholds is None else Goal(self.thresholds.primary, self.hits(self.thresholds.primary))


def ended_runs(epochs: DataFrame) -> DataFrame:
    """Return one row per ended run, with its final train loss."""
    runs = epochs[epochs["has_ended"]].drop_duplicates("run").set_index("run", drop=False)
    return runs.assign(final_train_loss=final_train_losses(epochs))


def settings(logs: Logs) -> list[Setting]:
    """Return every task of every suite, the weightiest first, with its parts recognised."""
    found = []
    bench = {} if logs.bench.empty else dict(zip(logs.bench["name"], logs.bench["value"], strict=True))
    for (suite, task), epochs in without_tuning(logs.epochs).groupby(TASK_KEY):
        refreshes = logs.refreshes[(logs.refreshes["suite"] == suite) & (logs.refreshes["task"] == task)]
        runs = logs.runs[(logs.runs["suite"] == suite) & (logs.runs["task"] == task) & logs.runs["has_ended"]]
        levels, labels = thresholds_of(str(suite), str(task), epochs), parts(runs, str(suite))
        names = dict(zip(runs["label"], runs["name"], strict=True))
        # Rates are often tuned on another day than the fresh seeds are run, when the machine is busier or less so.
        prices = product_prices(fresh(epochs, str(suite)), logs.bench)
        one = Setting(str(suite), str(task), epochs, refreshes, levels, labels, names, prices, bench)
        found.append(replace(one, epochs=coloured(epochs, one.best)))
    return sorted((replace(one, repeats=repeats_of(one, found)) for one in found), key=weight)


def repeats_of(setting: Setting, found: list[Setting]) -> tuple[Setting, ...]:
    """Return the other settings in which runs of this one may have been made once more."""
    alike = [one for one in found if one.task == setting.task and one.kind in REPEATING and one is not setting]
    return tuple(alike) if setting.kind in REPEATING else ()


def weight(setting: Setting) -> tuple[int, int]:
    """Return where a task stands in the report: by suite, and within it the one with most methods first."""
    order = [*SUITES, setting.suite]
    return order.index(setting.suite), -len(setting.by_label)

"""The tables of facts agree with what the laboratory can run."""

from typing import get_args

import pytest

from cao_lab.config import DatasetName, RunConfig
from cao_lab.facts import DATASETS, METHODS, SUITES, dataset_of, judged_datasets, kind_of, method_info, suites_of
from cao_lab.optimizer_config import LBFGSConfig, optimizer_configs
from cao_lab.suites import SUITES as RUNNABLE
from cao_lab.suites import rounds_of
from cao_lab.suites.contests import CONTESTS


def test_every_dataset_suite_and_optimizer_is_known() -> None:
    assert set(DATASETS) == set(get_args(DatasetName))
    assert set(SUITES) == set(RUNNABLE) | set(CONTESTS)
    assert set(suites_of(["solvers"])) == set(CONTESTS)
    assert set(METHODS) == set(optimizer_configs())


def budget(suite: str, config: RunConfig) -> int:
    """Return the epochs of the first entry that fits the task."""
    return next(epochs for start, epochs in SUITES[suite].budget.items() if config.task.startswith(start))


@pytest.mark.parametrize("suite", RUNNABLE)
def test_a_suite_keeps_its_budget(suite: str) -> None:
    configs = [one for one in next(rounds_of(RUNNABLE[suite])) if not isinstance(one.optimizer, LBFGSConfig)]
    assert {one.task: one.epochs for one in configs} == {one.task: budget(suite, one) for one in configs}


@pytest.mark.parametrize("suite", CONTESTS)
def test_a_suite_of_solvers_keeps_its_budget(suite: str) -> None:
    assert {one.budget.evaluations for one in CONTESTS[suite]} == set(SUITES[suite].budget.values())


@pytest.mark.parametrize(
    ("task", "classes", "model"),
    [
        ("cifar100-resnet18w8-n5000", 100, "resnet18w8-n5000"),
        ("cifar10-resnet18", 10, "resnet18"),
        ("breast-cancer-linear-full", 2, "linear-full"),
        ("digits", 10, ""),
    ],
)
def test_a_task_begins_with_its_dataset(task: str, classes: int, model: str) -> None:
    info, rest = dataset_of(task)
    assert info is not None
    assert (info.classes, rest) == (classes, model)


def test_what_is_not_listed_is_nobodys() -> None:
    assert dataset_of("digitsx-mlp") == (None, "digitsx-mlp")
    assert kind_of("mine") is None
    assert method_info("mine").title == "mine"


def test_suites_and_datasets_come_in_the_order_of_the_tables() -> None:
    assert suites_of(["tuned", "comparison"]) == ("paper", "mini", "mini-tuned", "demo")
    assert judged_datasets() == ("cifar10", "cifar100", "digits")
    assert judged_datasets(("resnet18", "resnet34")) == ("cifar10", "cifar100")

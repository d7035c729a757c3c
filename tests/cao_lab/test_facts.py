"""The tables of facts agree with what the laboratory can run."""

import pytest

from cao_lab.facts import METHODS, dataset_of, judged_datasets, kind_of, method_info, suites_of
from cao_lab.optimizer_config import optimizer_configs


def test_every_optimizer_with_a_title_can_be_run() -> None:
    # The logs have a method that is retired.
    assert set(METHODS) <= {*optimizer_configs(), "cao-adam"}


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
    assert suites_of(["comparison"]) == ("paper", "narrow", "mini", "demo")
    assert suites_of(["tuned"]) == ("mini-tuned", "digits-tuned", "transformer")
    assert judged_datasets() == ("cifar10", "cifar100", "digits", "pydoc")
    assert judged_datasets(("resnet18", "resnet34")) == ("cifar10", "cifar100")

"""Tables of the document on made-up runs, of which each number can be worked out by hand."""

from pathlib import Path

import pytest
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, write_suite

from cao_lab.reporting.document import networks_table, repeated_table, swept_table, tuned_table
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import Setting, settings

TASK = "cifar100-resnet18w8-n5000"


def found(folder: Path, runs: list[Run]) -> dict[tuple[str, str], Setting]:
    return {(one.suite, one.task): one for one in settings(load_logs(write_suite(folder, runs)))}


def by_name(table: DataFrame) -> dict[str, dict[str, str]]:
    return {str(row[""]): {str(key): str(value) for key, value in row.items()} for row in table.to_dict("records")}


def test_a_repeated_run_is_compared_seed_by_seed(tmp_path: Path) -> None:
    old = [Run([4.0, loss], seed=seed, task=TASK, accuracies=[0.1, 0.2]) for seed, loss in enumerate((3.0, 3.2))]
    new = [
        Run([4.0, loss], seed=seed, task=TASK, suite="mini-again", accuracies=[0.1, 0.21])
        for seed, loss in enumerate((3.1, 3.1))
    ]
    places = found(tmp_path, [*old, *new])
    row = by_name(repeated_table(places["mini", TASK], places["mini-again", TASK]))["CAO k=1"]
    assert row["train loss before"] == "3.100 ± 0.141"
    assert row["now"] == "3.100 ± 0.000"
    assert row["change"] == "0.000 ± 0.141"
    assert row["largest on a seed"] == "0.100"
    assert row["accuracy, points"] == "1.0 ± 0.0"


def test_a_sweep_shows_each_pair_and_its_divergences(tmp_path: Path) -> None:
    def run(damping: float, seed: int, losses: list[float], status: str = "finished") -> Run:
        label = f"cao-rank1-damping{damping:g}"
        return Run(losses, label, seed, CAO | {"damping": damping}, "mini-sensitivity", TASK, status)

    runs = [run(0.1, 0, [4.0, 3.4]), run(0.1, 1, [4.0, 3.6])]
    runs += [run(0.001, seed, [9.0, float("nan")], "diverged") for seed in (0, 1)]
    runs += [Run([4.0, 3.2], "cao-rank0", 0, CAO | {"rank": 0}, "mini-sensitivity", TASK)]
    table = swept_table(found(tmp_path, runs)["mini-sensitivity", TASK])
    plain, small, large = table.to_dict("records")
    assert (plain["k"], plain["m"], plain["final train loss"]) == ("0", "–", "3.200")
    assert (small["η"], small["effective rate α/η"], small["diverged"]) == ("0.001", "10", "2 of 2")
    assert (small["final train loss"], small["test accuracy, %"]) == ("–", "–")
    assert (large["η"], large["effective rate α/η"], large["diverged"]) == ("0.1", "0.1", "0 of 2")
    assert large["final train loss"] == "3.500 ± 0.141"
    assert large["epochs to 3.454"] == "2.0 (1 of 2 seeds)"


def test_a_tuned_table_names_damping_and_the_rate_of_the_long_run(tmp_path: Path) -> None:
    def tuned(label: str, optimizer: dict[str, object], loss: float) -> list[Run]:
        return [Run([4.0, loss], label, seed, optimizer, "mini-tuned", TASK) for seed in (1, 2)]

    runs = tuned("sgd", SGD, 3.6) + tuned("adam", ADAM, 3.4)
    runs += tuned("cao", CAO, 3.5) + tuned("cao-damping0.01", CAO | {"damping": 0.01, "momentum": 0.9}, 3.3)
    rows = by_name(tuned_table(found(tmp_path, runs)["mini-tuned", TASK]))
    assert list(rows) == ["CAO k=1, momentum 0.9, η = 0.01", "Adam", "CAO k=1", "SGD, momentum 0.9"]
    assert [row["effective"] for row in rows.values()] == ["10", "–", "0.1", "0.1"]
    assert [row["epochs to 3.454"] for row in rows.values()] == ["2.0 ± 0.0", "2.0 ± 0.0", "not reached", "not reached"]
    assert [row["to 3.684"] for row in rows.values()] == ["2.0 ± 0.0"] * 4


def test_who_diverged_on_a_seed_comes_last_and_says_so(tmp_path: Path) -> None:
    runs = [Run([4.0, loss], "adam", seed, ADAM, "mini-tuned", TASK) for seed, loss in ((1, 3.5), (2, 3.7))]
    runs += [Run([4.0, 3.0], "sgd", 1, SGD, "mini-tuned", TASK)]
    runs += [Run([4.0, 40.0], "sgd", 2, SGD, "mini-tuned", TASK)]
    rows = by_name(tuned_table(found(tmp_path, runs)["mini-tuned", TASK]))
    assert list(rows) == ["Adam", "SGD, momentum 0.9"]
    assert rows["SGD, momentum 0.9"]["final train loss"] == "3.000 (1 of 2 seeds)"
    assert rows["Adam"]["final train loss"] == "3.600 ± 0.141"


def test_where_rates_were_tuned_the_price_of_a_product_is_that_of_fresh_seeds(tmp_path: Path) -> None:
    """40 gradients take 4 s, so that 11 products in 2.2 s more cost 2 gradients each; tuning met a busy machine."""
    runs = [Run([4.0, 3.0], "sgd", 1, SGD, "mini-tuned", TASK, seconds=4.0)]
    runs += [Run([4.0, 3.0], "cao", 1, CAO, "mini-tuned", TASK, seconds=6.2)]
    runs += [Run([4.0, 3.5], f"cao-lr{lr}", 0, CAO | {"lr": lr}, "mini-tuned", TASK, seconds=60.0) for lr in (1.0, 2.0)]
    assert found(tmp_path, runs)["mini-tuned", TASK].prices["hessian"] == pytest.approx(2.0)


def test_other_networks_are_shown_one_below_the_other(tmp_path: Path) -> None:
    methods = {"adam": ADAM, "sgd": SGD, "cao": CAO}
    runs = [
        Run([4.0, 3.0], label, 0, one, task=task)
        for task in ("cifar10-resnet34w8-n5000", "cifar100-resnet34w8-n5000")
        for label, one in methods.items()
    ]
    table = networks_table(found(tmp_path, runs))
    assert list(table[""]) == ["CIFAR-10, ResNet-34"] * 3 + ["CIFAR-100, ResNet-34"] * 3
    assert list(table["method"]) == ["Adam", "SGD", "CAO k=1"] * 2


@pytest.mark.parametrize(("lr", "is_one_method"), [(0.1, True), (0.316, False)])
def test_rank_0_and_sgd_are_one_method_only_at_one_rate(tmp_path: Path, lr: float, is_one_method: bool) -> None:
    plain, rank0 = SGD | {"lr": lr, "momentum": 0.0}, CAO | {"rank": 0}
    methods = {"cao": CAO, "rank0": rank0, f"sgd-lr{lr}": plain}
    runs = [Run([4.0, 3.0], label, seed, one, "mini-tuned", TASK) for label, one in methods.items() for seed in (1, 2)]
    twins = found(tmp_path, runs)["mini-tuned", TASK].twins
    assert (twins == (f"sgd-lr{lr}", "rank0")) is is_one_method

"""Thresholds come from names alone, and parts are recognised by configuration."""

import math
from pathlib import Path

import pytest
from synthetic_logs import ADAM, CAO, SGD, Run, suite_of_runs, write_suite

from cao_lab.facts import DISTANCES
from cao_lab.protocol import declared_thresholds, distance_thresholds, ends_above_start, outcome_of_rate, parts
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import settings


@pytest.mark.parametrize(
    ("task", "primary"),
    [
        ("cifar100-resnet18", 0.75),
        ("cifar10-resnet34", 0.75),
        ("cifar10-resnet18w8", 0.75),
        ("cifar100-resnet18w16", 2.0),
        ("cifar100-resnet18w16-n5000", 0.75 * math.log(100)),
        ("cifar10-resnet18w16-n5000", 0.75 * math.log(10)),
        ("digits-mlp", 0.1),
    ],
)
def test_a_task_has_its_threshold_by_name(task: str, primary: float) -> None:
    thresholds = declared_thresholds(task)
    assert thresholds is not None
    assert thresholds.primary == pytest.approx(primary, abs=1e-3)
    assert thresholds.primary in thresholds.sweep


@pytest.mark.parametrize("task", ["breast-cancer-logistic-full", "digits-autoencoder-full", "own-model"])
def test_other_tasks_have_none(task: str) -> None:
    assert declared_thresholds(task) is None


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ([2.2, 1.0, 0.5, 0.4], "works"),
        ([2.2, 1.0, 0.5, 2.1], "slow"),
        ([2.2, 2.1, 2.05, 2.0], "slow"),
        ([2.2, 9.0, 0.5, 0.4], "unstable"),
        ([2.2, 1.0, 0.5, 9.0], "unstable"),
        ([2.2, math.nan, 0.5, 0.4], "unstable"),
        ([], "unstable"),
    ],
)
def test_a_rate_works_if_the_last_losses_are_low_and_none_is_above_the_start(losses: list[float], outcome: str) -> None:
    # ln 10 = 2.303 is the start, 0.85 of it 1.957.
    assert outcome_of_rate("digits-mlp", losses, has_diverged=any(math.isnan(loss) for loss in losses)) == outcome


def test_a_rate_whose_run_diverged_is_unstable_however_low_it_was() -> None:
    assert outcome_of_rate("digits-mlp", [1.0, 0.1], has_diverged=True) == "unstable"


@pytest.mark.parametrize(
    ("task", "losses", "steps", "is_above"),
    [
        ("digits-mlp", [60.0, 50.0], 12, True),
        ("digits-mlp", [2.4, 2.31], 12, False),
        ("digits-autoencoder-full", [0.9, 3.7e13], 1, True),
        ("digits-autoencoder-full", [0.9, 0.5], 1, False),
        ("diabetes-linear-full", [1.0, 1.2], 1, True),
        ("diabetes-linear-full", [1.0, 1.05], 1, False),
        ("own-model", [], 3, False),
    ],
)
def test_a_run_that_ends_above_its_start_has_diverged(
    task: str, losses: list[float], steps: int, is_above: bool
) -> None:
    assert ends_above_start(task, losses, steps) is is_above


def test_variants_of_the_paper_are_parts_of_their_own_and_never_speak_for_cao(tmp_path: Path) -> None:
    variants = {"signed": {"negative_curvature": "signed"}, "lanczos": {"eigensolver": "lanczos"}}
    variants |= {"warm-up": {"warmup_steps": 40}, "both": {"negative_curvature": "signed", "eigensolver": "lanczos"}}
    runs = [Run([4.0, 3.0], "cao-rank1", 0, CAO | {"negative_curvature": "magnitude", "warmup_steps": 0})]
    runs += [Run([4.0, 1.0], label, seed, CAO | own) for label, own in variants.items() for seed in (0, 1)]
    found = parts(load_logs(write_suite(tmp_path, runs)).runs, "mini")
    assert found == {"cao": "cao-rank1", "signed": "signed", "lanczos": "lanczos", "warm-up": "warm-up"}


def test_distances_are_measured_from_the_lowest_loss(tmp_path: Path) -> None:
    runs = [Run([11.0, 5.0, 1.0], "adam", 0, ADAM), Run([11.0, 6.0, 2.0], "sgd", 0, SGD)]
    found = distance_thresholds(load_logs(write_suite(tmp_path, runs)).epochs, DISTANCES)
    assert found.primary == pytest.approx(1.01)
    assert found.sweep[0] == pytest.approx(2.0)


def test_parts_are_found_by_configuration(tmp_path: Path) -> None:
    runs = load_logs(write_suite(tmp_path, suite_of_runs())).runs
    assert parts(runs, "mini") == {
        "cao": "cao-rank1", "adam": "adam", "adamw": "adamw", "cao-momentum": "cao-rank1-momentum0.9", "sgd": "sgd",
        "matched": "sgd-lr0.1-momentum0", "rank0-inverse": "cao-rank0", "rank0-unit": "cao-rank0-scaling=unit",
        "rank3": "cao-rank3", "rank5": "cao-rank5", "random": "cao-rank1-sketch=random",
        "projected-out": "cao-rank1-sketch=projected-out",
    }  # fmt: skip


def test_rank_0_as_written_stands_in_for_matched_sgd(tmp_path: Path) -> None:
    runs = [Run([3.0], "cao", 0, CAO), Run([3.0], "cao-rank0", 0, CAO | {"rank": 0}), Run([3.0], "sgd", 0, SGD)]
    found = parts(load_logs(write_suite(tmp_path, runs)).runs, "demo")
    assert (found["matched"], found["sgd"]) == ("cao-rank0", "sgd")


def test_where_rates_are_tuned_the_label_with_most_seeds_speaks(tmp_path: Path) -> None:
    tuned = [Run([3.0], f"sgd-lr{rate}", 0, SGD | {"lr": rate}) for rate in (0.01, 0.1, 1.0)]
    tuned += [Run([3.0], "sgd-lr0.1", seed, SGD | {"lr": 0.1}) for seed in (10, 11, 12)]
    tuned += [Run([3.0], "cao", 0, CAO)]
    found = parts(load_logs(write_suite(tmp_path, tuned)).runs, "mini-tuned")
    assert found["sgd"] == "sgd-lr0.1"
    assert "matched" not in found


def test_the_control_of_tuned_runs_is_sgd_without_momentum(tmp_path: Path) -> None:
    runs = [Run([3.0], "cao", 0, CAO), Run([3.0], "sgd", 0, SGD), Run([3.0], "plain", 0, SGD | {"momentum": 0.0})]
    found = parts(load_logs(write_suite(tmp_path, runs)).runs, "mini-tuned")
    assert (found["sgd"], found["matched"]) == ("sgd", "plain")


def test_each_damping_has_a_best_rate_of_its_own(tmp_path: Path) -> None:
    runs = [
        Run(
            [3.0, 3.0 - damping * rate],
            f"cao-{damping}-{rate}",
            0,
            CAO | {"damping": damping, "lr": rate},
            "mini-tuned",
        )
        for damping in (0.1, 0.01)
        for rate in (1.0, 2.0)
    ]
    found = settings(load_logs(write_suite(tmp_path, runs)))[0]
    assert set(found.best["label"]) == {"cao-0.1-2.0", "cao-0.01-2.0"}


@pytest.mark.parametrize("last", [math.nan, math.inf, 0.01])
def test_a_run_that_diverged_is_never_the_best_however_low_it_was(tmp_path: Path, last: float) -> None:
    diverged = Run([1.0, 0.1, last], "adam-lr0.1", 0, ADAM | {"lr": 0.1}, "ill-conditioned", status="diverged")
    sound = Run([1.0, 0.5, 0.4], "adam-lr1", 0, ADAM | {"lr": 1.0}, "ill-conditioned")
    logs = load_logs(write_suite(tmp_path, [diverged, sound]))
    assert parts(logs.runs, "ill-conditioned")["adam"] == "adam-lr1"
    assert settings(logs)[0].best["label"].unique().tolist() == ["adam-lr1"]

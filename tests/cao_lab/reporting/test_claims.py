"""Verdicts follow their rules on runs whose outcome was made up to call for each of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, decay, suite_of_runs, write_suite

from cao_lab.reporting.claims import CLAIMS, audit
from cao_lab.reporting.intervals import Interval
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import settings
from cao_lab.reporting.verdicts import Verdict, all_of, direction, equality, with_control

NAN = float("nan")


def verdicts(folder: Path, runs: list[Run], claim: str) -> dict[str, str]:
    found = audit(settings(load_logs(write_suite(folder, runs))))
    rows = found[found["claim"] == claim]
    return dict(zip(rows["suite"], rows["verdict"], strict=True))


def methods(half_lives: dict[str, float], jitters: tuple[float, ...] = (-0.01, 0.0, 0.01)) -> list[Run]:
    configs = {
        "cao": CAO, "adam": ADAM, "sgd": SGD, "matched": SGD | {"lr": 0.1, "momentum": 0.0},
        "rank0": CAO | {"rank": 0}, "unit": CAO | {"rank": 0, "scaling": "unit"},
    }  # fmt: skip
    return [
        Run(decay(half_life, jitter=jitter), label, seed, configs[label])
        for label, half_life in half_lives.items()
        for seed, jitter in enumerate(jitters)
    ]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.5, Verdict.HOLDS),
        (0.5, 0.9, Verdict.FAILS),
        (0.9, 1.2, Verdict.UNDECIDED),
        (NAN, NAN, Verdict.UNDECIDED),
    ],
)
def test_direction_needs_the_whole_interval_on_one_side(low: float, high: float, verdict: Verdict) -> None:
    assert direction(Interval(1.0, low, high, 3)) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.5, 0.9, Verdict.HOLDS), (1.1, 3, Verdict.FAILS), (-3, -1.1, Verdict.FAILS), (-2, 0, Verdict.UNDECIDED),
     (NAN, NAN, Verdict.UNDECIDED)],
)  # fmt: skip
def test_equality_needs_the_interval_inside_the_margin(low: float, high: float, verdict: Verdict) -> None:
    assert equality(Interval(0.0, low, high, 3), -1, 1) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.09, Verdict.RATE), (1.01, 1.05, Verdict.RATE), (1.2, 1.5, Verdict.HOLDS), (0.8, 1.5, Verdict.UNDECIDED)],
)
def test_a_gain_counts_only_beyond_the_control(low: float, high: float, verdict: Verdict) -> None:
    assert with_control(Interval(2.0, 1.5, 2.5, 3), Interval(1.0, low, high, 3)) is verdict


def test_the_worst_part_decides() -> None:
    assert all_of([Verdict.HOLDS, Verdict.RATE]) is Verdict.RATE
    assert all_of([Verdict.HOLDS, Verdict.UNDECIDED, Verdict.FAILS]) is Verdict.FAILS


@pytest.mark.parametrize(
    ("half_lives", "verdict"),
    [
        ({"cao": 5, "adam": 15, "matched": 10}, Verdict.HOLDS),
        ({"cao": 5, "adam": 15, "matched": 5.1}, Verdict.RATE),
        ({"cao": 5, "adam": 15, "rank0": 5.1}, Verdict.RATE),
        ({"cao": 15, "adam": 5, "matched": 10}, Verdict.FAILS),
        ({"cao": 5, "adam": 15}, Verdict.UNDECIDED),
        ({"cao": 5}, Verdict.UNTESTED),
    ],
)
def test_speed_is_judged_against_adam_and_the_control(
    half_lives: dict[str, float], verdict: Verdict, tmp_path: Path
) -> None:
    assert verdicts(tmp_path, methods(half_lives), "speed")["mini"] == verdict


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    runs = methods({"cao": 5, "adam": 15, "matched": 10}, jitters=(0.0,))
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.UNDECIDED


def test_an_adam_that_never_arrives_gives_a_bound_and_says_so(tmp_path: Path) -> None:
    runs = methods({"cao": 5, "adam": 1000, "matched": 10})
    found = audit(settings(load_logs(write_suite(tmp_path, runs))))
    row = found[(found["claim"] == "speed") & (found["suite"] == "mini")].iloc[0]
    assert row["verdict"] == Verdict.HOLDS
    assert "3 of 3 seeds against 0 of 3: a bound" in row["evidence"]


def test_a_bound_of_one_refutes_nothing(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.9, 3.0], "cao", seed, CAO) for seed in range(3)]
    runs += [Run([4.0, 3.9, 3.8], "adam", seed, ADAM) for seed in range(3)]
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.UNDECIDED


def test_a_cao_that_never_arrives_does_not_win(tmp_path: Path) -> None:
    runs = methods({"cao": 1000, "adam": 5, "matched": 10})
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.FAILS


def test_a_cao_that_diverges_early_is_not_called_fast(tmp_path: Path) -> None:
    runs = methods({"adam": 8, "matched": 10})
    runs += [Run([4.6, float("nan")], "cao", seed, CAO, status="diverged", budget=20) for seed in range(3)]
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.FAILS


def test_a_threshold_reached_in_the_first_epoch_cannot_tell(tmp_path: Path) -> None:
    runs = methods({"cao": 0.5, "adam": 15, "matched": 10})
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.UNDECIDED


def test_slower_without_curvature_may_be_a_matter_of_rate(tmp_path: Path) -> None:
    runs = methods({"cao": 5, "unit": 15, "rank0": 5.05})
    assert verdicts(tmp_path, runs, "no curvature")["mini"] == Verdict.RATE


def test_accuracy_is_equal_only_within_a_point(tmp_path: Path) -> None:
    near = [Run([4.0, 3.0], "cao", seed, CAO, accuracies=[0.1, 0.5 + 0.001 * seed]) for seed in range(3)]
    near += [Run([4.0, 3.0], "adam", seed, ADAM, accuracies=[0.1, 0.501]) for seed in range(3)]
    assert verdicts(tmp_path / "near", near, "final accuracy")["mini"] == Verdict.HOLDS
    far = [replace(run, accuracies=[0.1, 0.6]) if run.label == "adam" else run for run in near]
    assert verdicts(tmp_path / "far", far, "final accuracy")["mini"] == Verdict.FAILS


def test_ranks_within_the_margins_are_insensitive(tmp_path: Path) -> None:
    assert verdicts(tmp_path, suite_of_runs(), "rank")["mini"] == Verdict.HOLDS


def test_one_indefinite_refresh_refutes_positive_definiteness(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", 0, CAO, eigenvalues=[5.0, -3.0]), Run([4.0, 3.0], "cao", 1, CAO, eigenvalues=[5.0])]
    assert verdicts(tmp_path / "fine", runs, "positive definite")["mini"] == Verdict.HOLDS
    runs.append(Run([4.0, 3.0], "cao", 2, CAO, eigenvalues=[-0.2]))
    assert verdicts(tmp_path / "uphill", runs, "positive definite")["mini"] == Verdict.FAILS


def test_a_diverged_run_refutes_stability(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", 0, CAO), Run([4.0, float("inf")], "cao", 1, CAO, status="diverged")]
    assert verdicts(tmp_path, runs, "stability")["mini"] == Verdict.FAILS


def test_process_memory_tests_nothing(tmp_path: Path) -> None:
    assert verdicts(tmp_path, suite_of_runs(), "memory")["mini"] == Verdict.UNTESTED


def sweep(epochs_of: dict[tuple[float, int], float]) -> list[Run]:
    return [
        Run(decay(half_life, 40), f"cao-damping{damping}-refresh_every{every}", 0,
            CAO | {"damping": damping, "refresh_every": every}, "sensitivity", "cifar100-resnet18",
            seconds=1 + 200 / every)
        for (damping, every), half_life in epochs_of.items()
    ]  # fmt: skip


def test_damping_that_slows_every_cell_is_confirmed(tmp_path: Path) -> None:
    runs = sweep(
        {(damping, every): 3 + 30 * damping + every / 800 for damping in (0.001, 0.1) for every in (200, 400, 800)}
    )
    assert verdicts(tmp_path, runs, "damping") == {"sensitivity": Verdict.HOLDS}


def test_a_refresh_interval_without_effect_leaves_nothing_to_balance(tmp_path: Path) -> None:
    runs = sweep({(damping, every): 3 + damping for damping in (0.001, 0.01, 0.1) for every in (200, 800)})
    assert verdicts(tmp_path, runs, "refresh") == {"sensitivity": Verdict.FAILS}


def rates(label: str, optimizer: dict[str, object], works_up_to: float, seeds: int = 2) -> list[Run]:
    return [
        Run([4.0, 1.0 if rate <= works_up_to else 4.0], f"{label}-{rate}", seed, optimizer | {"lr": rate},
            "stable-range", "digits-mlp")
        for rate in (0.1, 0.2, 0.4, 0.8, 1.6)
        for seed in range(seeds)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("works_up_to", "verdict"), [(0.8, Verdict.HOLDS), (0.1, Verdict.FAILS), (0.2, Verdict.UNDECIDED)]
)
def test_a_wider_window_of_rates_has_to_clear_the_bracket(works_up_to: float, verdict: Verdict, tmp_path: Path) -> None:
    plain = rates("sgd", SGD | {"momentum": 0.0}, 0.2)
    curved = rates("cao", CAO | {"damping": 1.0}, works_up_to)
    assert verdicts(tmp_path, plain + curved, "stable range") == {"stable-range": verdict}


def test_a_window_of_one_seed_is_no_verdict(tmp_path: Path) -> None:
    plain = rates("sgd", SGD | {"momentum": 0.0}, 0.2, seeds=1)
    curved = rates("cao", CAO | {"damping": 1.0}, 0.8, seeds=1)
    assert verdicts(tmp_path, plain + curved, "stable range") == {"stable-range": Verdict.UNDECIDED}


def test_only_what_is_absent_is_called_absent(tmp_path: Path) -> None:
    found = audit(settings(load_logs(write_suite(tmp_path, methods({"adam": 5})))))
    told = found[(found["suite"] == "mini") & (found["claim"] == "speed")]["evidence"].tolist()
    assert told == ["no ended runs of CAO (k = 1)"]


def test_a_ratio_of_nothing_is_unknown(tmp_path: Path) -> None:
    runs = methods({"cao": 500, "adam": 500})
    found = audit(settings(load_logs(write_suite(tmp_path, runs))))
    told = found[(found["suite"] == "mini") & (found["claim"] == "factor")]["evidence"].tolist()
    assert "Adam needs an unknown multiple of CAO's epochs" in told[0]


def test_every_claim_states_its_rule_and_the_papers_setting_is_always_listed(tmp_path: Path) -> None:
    found: DataFrame = audit(settings(load_logs(write_suite(tmp_path, methods({"cao": 5})))))
    assert all(len(claim.rule) > 80 for claim in CLAIMS)
    assert set(found["claim"]) == {claim.name for claim in CLAIMS}
    assert (found.loc[found["suite"] == "paper", "verdict"] == Verdict.UNTESTED).all()

"""Verdicts follow their rules on runs whose outcome was made up to call for each of them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, decay, suite_of_runs, write_suite

from cao_lab.facts import PAPER_COSTS, PAPER_TASK
from cao_lab.reporting.claims import CLAIMS, audit
from cao_lab.reporting.intervals import Interval
from cao_lab.reporting.judges.cost import bar
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import settings
from cao_lab.reporting.verdicts import Verdict, all_of, direction, equality, with_control

NAN = float("nan")


def verdicts(folder: Path, runs: list[Run], claim: str, key: str = "suite") -> dict[str, str]:
    found = audit(settings(load_logs(write_suite(folder, runs))))
    rows = found[found["claim"] == claim]
    return dict(zip(rows[key], rows["verdict"], strict=True))


def by_part(folder: Path, runs: list[Run], claim: str, suite: str = "mini") -> dict[str, tuple[str, str]]:
    found = audit(settings(load_logs(write_suite(folder, runs))))
    rows = found[(found["claim"] == claim) & (found["suite"] == suite)]
    return dict(zip(rows["part"], zip(rows["verdict"], rows["evidence"], strict=True), strict=True))


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
    assert direction(Interval(1.0, low, high, (3, 3))) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.5, 0.9, Verdict.HOLDS), (1.1, 3, Verdict.FAILS), (-3, -1.1, Verdict.FAILS), (-2, 0, Verdict.UNDECIDED),
     (NAN, NAN, Verdict.UNDECIDED)],
)  # fmt: skip
def test_equality_needs_the_interval_inside_the_margin(low: float, high: float, verdict: Verdict) -> None:
    assert equality(Interval(0.0, low, high, (3, 3), is_ratio=False), -1, 1) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.09, Verdict.RATE), (1.01, 1.05, Verdict.RATE), (1.2, 1.5, Verdict.HOLDS), (0.8, 1.5, Verdict.UNDECIDED)],
)
def test_a_gain_counts_only_beyond_the_control(low: float, high: float, verdict: Verdict) -> None:
    assert with_control(Interval(2.0, 1.5, 2.5, (3, 3)), Interval(1.0, low, high, (3, 3))) is verdict


@pytest.mark.parametrize(
    ("low", "high", "noise", "verdict"),
    [(1.1, 1.5, 1.2, Verdict.HOLDS), (1.1, 1.5, 1.4, Verdict.UNDECIDED), (0.6, 0.9, 1.2, Verdict.FAILS)],
)
def test_no_direction_is_finer_than_the_noise(low: float, high: float, noise: float, verdict: Verdict) -> None:
    assert direction(Interval((low * high) ** 0.5, low, high, (3, 3), noise=noise)) is verdict


@pytest.mark.parametrize(
    ("low", "high", "noise", "verdict"),
    [(-0.5, 0.9, 0.8, Verdict.HOLDS), (-0.5, 0.9, 1.2, Verdict.UNDECIDED), (2, 4, 1.2, Verdict.FAILS),
     (2, 4, 3.5, Verdict.UNDECIDED)],
)  # fmt: skip
def test_no_equality_is_finer_than_the_noise(low: float, high: float, noise: float, verdict: Verdict) -> None:
    found = Interval((low + high) / 2, low, high, (3, 3), noise=noise, is_ratio=False)
    assert equality(found, -1, 1) is verdict


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
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.UNTESTABLE


def test_a_threshold_that_neither_reaches_is_not_testable(tmp_path: Path) -> None:
    assert verdicts(tmp_path, methods({"cao": 500, "adam": 500}), "speed")["mini"] == Verdict.UNTESTABLE


def test_no_gain_is_confirmed_within_the_noise_of_a_method_against_itself(tmp_path: Path) -> None:
    half_lives = {"cao": 5, "adam": 15, "matched": 10}
    assert verdicts(tmp_path / "alone", methods(half_lives), "speed")["mini"] == Verdict.HOLDS
    # SGD at the effective rate and rank 0 are one method; here one takes four times as long as the other.
    noisy = methods(half_lives | {"rank0": 40})
    assert verdicts(tmp_path / "noisy", noisy, "speed")["mini"] == Verdict.UNDECIDED


def test_the_papers_factor_is_asked_at_the_papers_loss_alone(tmp_path: Path) -> None:
    near = methods({"cao": 2.5, "adam": 8})
    assert verdicts(tmp_path / "near", [named(one, PAPER_TASK) for one in near], "factor")["mini"] == Verdict.HOLDS
    far = methods({"cao": 25, "adam": 80})
    assert verdicts(tmp_path / "far", [named(one, PAPER_TASK) for one in far], "factor")["mini"] == Verdict.UNTESTABLE


def named(run: Run, task: str) -> Run:
    return replace(run, task=task)


def test_slower_without_curvature_may_be_a_matter_of_rate(tmp_path: Path) -> None:
    runs = methods({"cao": 5, "unit": 15, "rank0": 5.05})
    assert verdicts(tmp_path, runs, "no curvature")["mini"] == Verdict.RATE


def test_accuracy_is_equal_only_within_a_point(tmp_path: Path) -> None:
    near = [Run([4.0, 3.0], "cao", seed, CAO, accuracies=[0.1, 0.5 + 0.001 * seed]) for seed in range(3)]
    near += [Run([4.0, 3.0], "adam", seed, ADAM, accuracies=[0.1, 0.501]) for seed in range(3)]
    assert verdicts(tmp_path / "near", near, "final accuracy")["mini"] == Verdict.HOLDS
    far = [replace(run, accuracies=[0.1, 0.6]) if run.label == "adam" else run for run in near]
    assert verdicts(tmp_path / "far", far, "final accuracy")["mini"] == Verdict.FAILS


@pytest.mark.parametrize(("half_life", "verdict"), [(5.05, Verdict.HOLDS), (9.0, Verdict.FAILS)])
def test_ranks_within_the_margins_are_insensitive(half_life: float, verdict: Verdict, tmp_path: Path) -> None:
    jitters, accuracies = (-0.002, 0.0, 0.002), [0.5] * 20
    runs = [
        Run(decay(life, jitter=jitter), f"cao-rank{rank}", seed, CAO | {"rank": rank}, accuracies=accuracies)
        for rank, life in ((1, 5.0), (3, 5.0), (5, half_life))
        for seed, jitter in enumerate(jitters)
    ]
    assert verdicts(tmp_path, runs, "rank")["mini"] == verdict


@pytest.mark.parametrize(("half_life", "verdict"), [(5.05, Verdict.HOLDS), (9.0, Verdict.FAILS)])
def test_the_papers_own_form_is_compared_with_our_main_setting(
    half_life: float, verdict: Verdict, tmp_path: Path
) -> None:
    forms = {"cao": {}, "signed": {"negative_curvature": "signed"}, "lanczos": {"eigensolver": "lanczos"}}
    forms["warm"] = {"warmup_steps": 40}
    runs = [
        Run(decay(half_life if label == "signed" else 5.0, jitter=jitter), label, seed, CAO | own)
        for label, own in forms.items()
        for seed, jitter in enumerate((-0.002, 0.0, 0.002))
    ]
    assert verdicts(tmp_path, runs, "as printed")["mini"] == verdict
    assert verdicts(tmp_path / "two", runs[:6], "as printed")["mini"] == Verdict.UNTESTED


@pytest.mark.parametrize(
    ("half_life", "verdict"), [(2.0, Verdict.HOLDS), (9.0, Verdict.FAILS), (5.0, Verdict.UNDECIDED)]
)
def test_a_curve_is_consistently_below_if_it_is_so_at_every_epoch(
    half_life: float, verdict: Verdict, tmp_path: Path
) -> None:
    runs = methods({"cao": half_life, "adam": 5, "sgd": 5}, jitters=(-0.001, 0.0, 0.001))
    assert verdicts(tmp_path, runs, "whole curve")["mini"] == verdict


@pytest.mark.parametrize(("spread", "verdict"), [(0.0001, Verdict.HOLDS), (0.1, Verdict.UNDECIDED)])
def test_variances_are_told_apart_by_fishers_interval(spread: float, verdict: Verdict, tmp_path: Path) -> None:
    runs = methods({"adam": 5, "sgd": 5}, jitters=(-0.1, 0.0, 0.1))
    runs += methods({"cao": 5}, jitters=(-spread, 0.0, spread))
    assert verdicts(tmp_path, runs, "early variance")["mini"] == verdict


@pytest.mark.parametrize(("power", "verdict"), [(1.0, Verdict.HOLDS), (2.0, Verdict.FAILS), (0.5, Verdict.FAILS)])
def test_the_cost_of_rank_is_the_exponent_of_its_surplus(power: float, verdict: Verdict, tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "sgd", seed, SGD, seconds=2.0) for seed in (0, 1)]
    runs += [
        Run([4.0, 3.0], f"cao-rank{rank}", seed, CAO | {"rank": rank}, seconds=2.0 + (1 + 0.01 * seed) * rank**power)
        for rank in (1, 3, 5)
        for seed in (0, 1)
    ]
    assert verdicts(tmp_path, runs, "cost of rank")["mini"] == verdict


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(2.5, Verdict.HOLDS), (10.0, Verdict.FAILS), (4.2, Verdict.UNDECIDED)]
)
def test_the_surplus_of_time_is_normalised_to_the_papers_interval(
    seconds: float, verdict: Verdict, tmp_path: Path
) -> None:
    # A refresh every 40 steps: a tenth of the surplus is due at 400. The bar is 1.1 × 12.83/10.56 = 1.336.
    runs = [Run([4.0, 3.0], "sgd", seed, SGD, seconds=1.0) for seed in range(3)]
    runs += [Run([4.0, 3.0], "cao", seed, CAO, seconds=seconds * (1 + 0.1 * seed) / 1.1) for seed in range(3)]
    assert verdicts(tmp_path, runs, "time")["mini"] == verdict


@pytest.mark.parametrize("task", PAPER_COSTS)
def test_the_papers_own_costs_pass_the_rules_for_them(task: str) -> None:
    sgd, cao = PAPER_COSTS[task]
    for unit in ("seconds", "memory"):
        assert cao[unit] / sgd[unit] <= bar(unit)


def test_one_indefinite_refresh_refutes_positive_definiteness(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", 0, CAO, eigenvalues=[5.0, -3.0]), Run([4.0, 3.0], "cao", 1, CAO, eigenvalues=[5.0])]
    assert verdicts(tmp_path / "fine", runs, "positive definite")["mini"] == Verdict.HOLDS
    runs.append(Run([4.0, 3.0], "cao", 2, CAO, eigenvalues=[-0.2]))
    assert verdicts(tmp_path / "uphill", runs, "positive definite")["mini"] == Verdict.FAILS


def test_refreshes_of_runs_that_chose_a_rate_do_not_count_beside_fresh_seeds(tmp_path: Path) -> None:
    chosen = [Run([4.0, 3.0], "cao", seed, CAO, "mini-tuned", eigenvalues=[5.0]) for seed in (1, 2)]
    choosing = [
        Run([4.0, 3.0], f"cao-lr{rate}", 0, CAO | {"lr": rate}, "mini-tuned", eigenvalues=[-5.0]) for rate in (0.1, 1.0)
    ]
    found = audit(settings(load_logs(write_suite(tmp_path, chosen + choosing))))
    row = found[(found["claim"] == "positive definite") & (found["suite"] == "mini-tuned")].iloc[0]
    assert (row["verdict"], row["evidence"]) == (Verdict.HOLDS, "0 of 4 refreshes captured a λ ≤ −η")


def test_a_diverged_run_refutes_stability(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", 0, CAO), Run([4.0, float("inf")], "cao", 1, CAO, status="diverged")]
    assert verdicts(tmp_path, runs, "stability")["mini"] == Verdict.FAILS


def test_a_run_that_finishes_above_its_start_refutes_stability_too(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", 0, CAO), Run([4.0, 50.0], "cao", 1, CAO)]
    logs = load_logs(write_suite(tmp_path, runs))
    found = audit(settings(logs))
    rows = found[(found["claim"] == "stability") & (found["suite"] == "mini")]
    assert rows["verdict"].tolist() == [Verdict.FAILS]
    assert any("finished at a loss of 50, above its start: counted as diverged" in one for one in logs.missing)


def test_process_memory_tests_nothing(tmp_path: Path) -> None:
    assert verdicts(tmp_path, suite_of_runs(), "memory")["mini"] == Verdict.UNTESTED


def sweep(
    epochs_of: dict[tuple[float, int], float], jitters: dict[float, tuple[float, ...]] | None = None, rank: int = 1
) -> list[Run]:
    return [
        Run(decay(half_life, 40, jitter=jitter), f"cao-rank{rank}-damping{damping}-refresh_every{every}", seed,
            CAO | {"rank": rank, "damping": damping, "refresh_every": every}, "sensitivity", "cifar100-resnet18",
            seconds=1 + 200 / every)
        for (damping, every), half_life in epochs_of.items()
        for seed, jitter in enumerate((jitters or {}).get(damping, (0.0,)))
    ]  # fmt: skip


CELLS = {(damping, every): 3.0 for damping in (0.001, 0.1) for every in (200, 400, 800)}


PLAIN_CELLS = {(0.001, 400): 3.0, (0.1, 400): 3.0}


@pytest.mark.parametrize(
    ("small", "of_rank_0", "verdict"),
    [
        (0.1, 0.00001, Verdict.HOLDS),
        (0.1, 0.1, Verdict.RATE),
        (0.1, 0.001, Verdict.UNDECIDED),
        (0.1, None, Verdict.UNDECIDED),
        (0.001, 0.00001, Verdict.UNDECIDED),
        (0.00001, 0.1, Verdict.FAILS),
    ],
)
def test_damping_reduces_variance_if_seeds_lie_closer_and_those_of_rank_0_do_not(
    small: float, of_rank_0: float | None, verdict: Verdict, tmp_path: Path
) -> None:
    def jitters(spread: float) -> dict[float, tuple[float, ...]]:
        return {0.001: (-spread, 0.0, spread), 0.1: (-0.001, 0.0, 0.001)}

    runs = sweep(CELLS, jitters(small))
    runs += sweep(PLAIN_CELLS, jitters(of_rank_0), rank=0) if of_rank_0 else []
    assert verdicts(tmp_path, runs, "damping and variance", "part")["over seeds"] == verdict


def test_variance_takes_two_seeds(tmp_path: Path) -> None:
    assert verdicts(tmp_path, sweep(CELLS), "damping and variance", "part")["over seeds"] == Verdict.UNTESTED


def wavy(runs: list[Run], sizes: dict[float, float]) -> list[Run]:
    """Let losses go up and down from epoch to epoch by a share that depends on η, and on the seed a little."""
    return [
        replace(
            run,
            losses=[
                loss * (1 + (1 + 0.1 * run.seed) * sizes[run.optimizer["damping"]] * (-1) ** at)
                for at, loss in enumerate(run.losses)
            ],
        )
        for run in runs
    ]


@pytest.mark.parametrize(
    ("small", "of_rank_0", "verdict"),
    [
        (0.02, 0.004, Verdict.HOLDS),
        (0.02, 0.02, Verdict.RATE),
        (0.02, None, Verdict.UNDECIDED),
        (0.001, 0.005, Verdict.FAILS),
    ],
)
def test_damping_smooths_a_run_if_its_losses_jump_less_from_epoch_to_epoch(
    small: float, of_rank_0: float | None, verdict: Verdict, tmp_path: Path
) -> None:
    jitters = dict.fromkeys((0.001, 0.1), (-0.01, 0.0, 0.01))
    runs = wavy(sweep(CELLS, jitters), {0.001: small, 0.1: 0.005})
    if of_rank_0:
        runs += wavy(sweep(PLAIN_CELLS, jitters, rank=0), {0.001: of_rank_0, 0.1: 0.005})
    assert verdicts(tmp_path, runs, "damping and variance", "part")["within a run"] == verdict


def shaken(runs: list[Run], dampings: tuple[float, ...]) -> list[Run]:
    return [
        replace(run, losses=[4.0, 9.0, *run.losses[2:]]) if run.optimizer["damping"] in dampings else run
        for run in runs
    ]


@pytest.mark.parametrize(
    ("with_curvature", "of_rank_0", "verdict"),
    [
        ((0.001,), (), Verdict.HOLDS),
        ((0.001,), (0.001,), Verdict.RATE),
        ((0.001,), None, Verdict.UNDECIDED),
        ((), (0.001,), Verdict.FAILS),
        ((0.001, 0.1), (), Verdict.UNDECIDED),
        ((0.1,), (), Verdict.UNDECIDED),
    ],
)
def test_a_small_damping_destabilises_if_its_runs_go_above_their_start_and_rank_0_does_not(
    with_curvature: tuple[float, ...], of_rank_0: tuple[float, ...] | None, verdict: Verdict, tmp_path: Path
) -> None:
    runs = shaken(sweep(CELLS), with_curvature)
    runs += [] if of_rank_0 is None else shaken(sweep(PLAIN_CELLS, rank=0), of_rank_0)
    found = verdicts(tmp_path / "clipped", runs, "small damping", "part")
    assert (found["with the clip"], found["without the clip"]) == (verdict, Verdict.UNTESTED)
    # The paper's remedy is the clip: what it hides shows without it.
    freed = [replace(run, optimizer=run.optimizer | {"max_update_norm": None}) for run in runs]
    found = verdicts(tmp_path / "freed", freed, "small damping", "part")
    assert (found["with the clip"], found["without the clip"]) == (Verdict.UNTESTED, verdict)


@pytest.mark.parametrize(("small", "verdict"), [(0.1, Verdict.HOLDS), (0.01, Verdict.FAILS), (0.001, Verdict.FAILS)])
def test_the_estimate_is_judged_by_its_relative_residual(small: float, verdict: Verdict, tmp_path: Path) -> None:
    cells = {(damping, every): 3.0 for damping in (0.001, 0.1) for every in (200, 800)}
    three_seeds = dict.fromkeys((0.001, 0.1), (-0.01, 0.0, 0.01))
    runs = [
        # λ₁ = 1 has a residual of 0.01 in made-up logs; a tenth of it is a relative residual ten times as large.
        replace(run, eigenvalues=[0.01 / small if run.optimizer["damping"] == 0.001 else 1.0, 0.001])
        for run in sweep(cells, three_seeds)
    ]
    assert verdicts(tmp_path, runs, "small damping", "part")["the estimate"] == verdict


def test_the_angle_of_an_estimate_follows_from_its_residual_and_its_gap(tmp_path: Path) -> None:
    cells = {(damping, 200): 3.0 for damping in (0.001, 0.1)}
    runs = [
        replace(run, eigenvalues=[1.0, -0.98 if run.optimizer["damping"] == 0.001 else 0.0001])
        for run in sweep(cells, dict.fromkeys((0.001, 0.1), (-0.01, 0.0)))
    ]
    told = by_part(tmp_path, runs, "small damping", "sensitivity")["the estimate"][1]
    # sin φ ≤ 0.01/(1 − 0.98) = 1/2, and 0.01.
    assert "at most 30° and 1° (medians)" in told


@pytest.mark.parametrize(
    ("of_rank_0", "verdict"),
    [((6.0, 3.0), Verdict.HOLDS), ((3.0, 6.0), Verdict.RATE), ((), Verdict.UNDECIDED)],
)
def test_damping_that_slows_every_cell_is_confirmed_if_it_does_not_slow_rank_0(
    of_rank_0: tuple[float, ...], verdict: Verdict, tmp_path: Path
) -> None:
    runs = sweep(
        {(damping, every): 3 + 30 * damping + every / 800 for damping in (0.001, 0.1) for every in (200, 400, 800)}
    )
    three_seeds = dict.fromkeys((0.001, 0.1), (-0.01, 0.0, 0.01))
    runs += sweep(dict(zip(PLAIN_CELLS, of_rank_0, strict=False)), three_seeds, rank=0)
    assert verdicts(tmp_path, runs, "damping") == {"sensitivity": verdict}


def test_a_refresh_interval_without_effect_leaves_nothing_to_balance(tmp_path: Path) -> None:
    runs = sweep({(damping, every): 3 + damping for damping in (0.001, 0.01, 0.1) for every in (200, 800)})
    assert verdicts(tmp_path, runs, "refresh") == {"sensitivity": Verdict.FAILS}


def rates(
    label: str,
    optimizer: dict[str, object],
    works_up_to: float,
    *,
    seeds: int = 2,
    later: float = 0.0,
    failure: float = 4.0,
) -> list[Run]:
    return [
        Run([2.2, 1.0 if rate <= works_up_to + seed * later else failure], f"{label}-{rate}", seed,
            optimizer | {"lr": rate}, "stable-range", "digits-mlp")
        for rate in (0.1, 0.2, 0.4, 0.8, 1.6)
        for seed in range(seeds)
    ]  # fmt: skip


PLAIN = SGD | {"momentum": 0.0}
CURVED = CAO | {"damping": 1.0}


@pytest.mark.parametrize(
    ("of_sgd", "of_cao", "verdict"),
    [(0.2, 0.8, Verdict.HOLDS), (0.2, 0.2, Verdict.UNDECIDED), (0.8, 0.1, Verdict.FAILS)],
)
def test_a_window_of_rates_is_wider_beyond_the_gap_between_rates(
    of_sgd: float, of_cao: float, verdict: Verdict, tmp_path: Path
) -> None:
    runs = rates("sgd", PLAIN, of_sgd) + rates("cao", CURVED, of_cao)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": verdict}


def finely(label: str, optimizer: dict[str, object], edges: tuple[float, ...]) -> list[Run]:
    tried = [1.04**step for step in range(12)]
    return [
        Run([2.2, 1.0 if rate < 1.001 * edge else 4.0], f"{label}-{rate:.3f}", seed, optimizer | {"lr": rate},
            "stable-range", "digits-mlp")
        for seed, edge in enumerate(edges)
        for rate in tried
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "verdict", "told"),
    [(2, Verdict.HOLDS, "more than 10 % is not shown"), (5, Verdict.HOLDS, "by more than 10 %"), (0, Verdict.TIE, "")],
)
def test_wider_is_the_papers_word_and_ten_per_cent_our_margin(
    steps: int, verdict: Verdict, told: str, tmp_path: Path
) -> None:
    runs = finely("sgd", PLAIN, (1.04**2, 1.04**2)) + finely("rank5", CURVED | {"rank": 5}, (1.04 ** (2 + steps),) * 2)
    found = by_part(tmp_path, runs, "stable range", "stable-range")["k = 5"]
    assert (found[0], told in found[1]) == (verdict, True)


def test_windows_that_differ_from_seed_to_seed_decide_nothing(tmp_path: Path) -> None:
    runs = rates("sgd", PLAIN, 0.2) + rates("cao", CURVED, 0.2, later=0.6)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": Verdict.UNDECIDED}


def test_a_wider_window_within_the_noise_of_rank_0_and_sgd_decides_nothing(tmp_path: Path) -> None:
    runs = rates("sgd", PLAIN, 0.8) + rates("rank0", CURVED | {"rank": 0}, 0.2) + rates("cao", CURVED, 0.8)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": Verdict.UNDECIDED}


def test_a_window_of_one_seed_is_not_testable(tmp_path: Path) -> None:
    runs = rates("sgd", PLAIN, 0.2, seeds=1) + rates("cao", CURVED, 0.8, seeds=1)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": Verdict.UNTESTABLE}


def test_rates_that_are_only_too_slow_say_nothing_of_stability(tmp_path: Path) -> None:
    runs = rates("sgd", PLAIN, 0.2, failure=2.1) + rates("cao", CURVED, 0.8, failure=2.1)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": Verdict.UNTESTABLE}


def test_only_what_is_absent_is_called_absent(tmp_path: Path) -> None:
    found = audit(settings(load_logs(write_suite(tmp_path, methods({"adam": 5})))))
    told = found[(found["suite"] == "mini") & (found["claim"] == "speed")]["evidence"].tolist()
    assert told == ["no ended runs of CAO (k = 1)"]


def test_a_verdict_states_its_seeds_its_interval_and_its_noise(tmp_path: Path) -> None:
    found = audit(settings(load_logs(write_suite(tmp_path, suite_of_runs()))))
    told = found[(found["suite"] == "mini") & (found["claim"] == "speed")]["evidence"].tolist()
    assert re.search(r"Adam needs 2\.00× \[\d\.\d\d, \d\.\d\d\] \(n = 3 \+ 3, noise unknown\) CAO's epochs", told[0])


def test_a_run_that_was_made_again_in_another_suite_tells_the_noise(tmp_path: Path) -> None:
    runs = methods({"cao": 5, "adam": 15})
    again = [replace(run, losses=decay(7.5, jitter=0.0), suite="mini-again") for run in runs if run.label == "cao"]
    found = audit(settings(load_logs(write_suite(tmp_path, runs + again))))
    told = found[(found["suite"] == "mini") & (found["claim"] == "speed")]["evidence"].tolist()
    noise = re.search(r"Adam needs .*?noise (\d\.\d\d)×\)", told[0])
    # Half-lives of 5 ± 0.01 and of 7.5 cross any threshold 1.5 times apart.
    assert noise
    assert float(noise[1]) == pytest.approx(1.5, abs=0.03)


@pytest.mark.parametrize(("runs", "verdict"), [(28, Verdict.UNDECIDED), (29, Verdict.HOLDS)])
def test_stability_takes_so_many_runs_that_one_in_ten_would_have_diverged(
    runs: int, verdict: Verdict, tmp_path: Path
) -> None:
    # 0.9²⁹ = 0.047 is below 5 %, and 0.9²⁸ = 0.052 is not.
    assert (
        verdicts(tmp_path, [Run([4.0, 3.0], "cao", seed, CAO) for seed in range(runs)], "stability")["mini"] == verdict
    )


def test_what_is_undecided_says_what_would_decide_it(tmp_path: Path) -> None:
    """F(0.9875; 8, 8) = 5.61 < 6 < 6.46 = F(0.9875; 7, 7): with nine seeds a factor of six is told apart."""
    runs = methods({"cao": 5.0, "adam": 5.5, "sgd": 5.5, "matched": 5.2}, jitters=(-0.2, 0.0, 0.2))
    assert "to tell a factor of 6 takes 9 seeds" in by_part(tmp_path / "v", runs, "early variance")[""][1]
    assert "at most 10 % takes 29 runs without one" in by_part(tmp_path / "s", runs, "stability")[""][1]
    assert re.search(r"± 10 % takes \d+ seeds", by_part(tmp_path / "g", runs, "speed")["η = 0.1"][1])


def test_a_run_without_the_clip_says_nothing_of_stability(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", seed, CAO) for seed in range(29)]
    runs.append(Run([4.0, 50.0], "free", 0, CAO | {"max_update_norm": None}))
    assert verdicts(tmp_path, runs, "stability")["mini"] == Verdict.HOLDS


def test_where_dampings_were_tuned_the_main_setting_has_the_usual_one(tmp_path: Path) -> None:
    runs = [
        Run([4.0, loss], f"cao-damping{damping}", seed, CAO | {"damping": damping}, "mini-tuned")
        for damping, loss in ((0.1, 3.5), (0.01, 3.0))
        for seed in (1, 2)
    ]
    (found,) = settings(load_logs(write_suite(tmp_path, runs)))
    assert found.labels["cao"] == "cao-damping0.1"


def test_a_wider_window_within_the_gap_between_rates_decides_nothing(tmp_path: Path) -> None:
    # Rates are tried by factors of two: an edge that is twice another's may be the same.
    runs = rates("sgd", PLAIN, 0.2) + rates("cao", CURVED, 0.4)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": Verdict.UNDECIDED}


def test_what_repeats_a_comparison_or_is_no_claim_of_the_paper_is_not_counted(tmp_path: Path) -> None:
    found = audit(settings(load_logs(write_suite(tmp_path, suite_of_runs()))))
    own = found[found["suite"] == "mini"].set_index("claim")["is_counted"]
    assert own[["speed", "early loss", "rank"]].all()
    assert not own[["factor", "threshold range", "as printed", "time", "sufficient damping"]].any()


def at_damping(damping: float, half_life: float, clip: float | None, rank: int = 1, suite: str = "mini") -> list[Run]:
    optimizer = CAO | {"damping": damping, "rank": rank, "max_update_norm": clip}
    label = f"cao-rank{rank}-damping{damping:g}-{clip}"
    return [
        Run(decay(half_life, jitter=jitter), label, seed, optimizer, suite)
        for seed, jitter in enumerate((-0.01, 0.0, 0.01))
    ]


BASE = methods({"adam": 5, "sgd": 12})


def test_each_damping_is_judged_beside_its_own_control(tmp_path: Path) -> None:
    runs = BASE + at_damping(0.1, 15, 50.0) + at_damping(0.1, 15, 50.0, rank=0)
    runs += at_damping(0.01, 2.5, 500.0) + at_damping(0.01, 2.5, 500.0, rank=0)
    runs += at_damping(0.01, 2.5, None) + at_damping(0.01, 4.5, None, rank=0)
    found = {part: one[0] for part, one in by_part(tmp_path, runs, "speed").items()}
    assert list(found) == ["η = 0.1", "η = 0.01", "η = 0.01, no clip"]
    assert list(found.values()) == [Verdict.FAILS, Verdict.RATE, Verdict.HOLDS]


def test_a_damping_that_only_the_sweep_has_run_is_judged_beside_it(tmp_path: Path) -> None:
    sweep_of_mini = at_damping(0.01, 2.5, 50.0, suite="mini-sensitivity")
    sweep_of_mini += at_damping(0.01, 2.55, 50.0, rank=0, suite="mini-sensitivity")
    runs = BASE + at_damping(0.1, 15, 50.0) + sweep_of_mini
    found = by_part(tmp_path, runs, "speed")
    assert {part: one[0] for part, one in found.items()} == {
        "η = 0.1": Verdict.FAILS,
        "η = 0.01, c = 50": Verdict.RATE,
    }
    # Accuracies follow the losses: at the smaller η CAO ends above SGD.
    gap = by_part(tmp_path / "again", runs, "SGD's accuracy")
    assert gap["η = 0.01, c = 50"][0] == Verdict.HOLDS
    assert gap["η = 0.1"][0] == Verdict.FAILS


def test_durations_within_ten_per_cent_are_a_tie(tmp_path: Path) -> None:
    jitters = (-0.002, 0.0, 0.002)
    runs = methods({"cao": 5.0, "adam": 5.02, "matched": 5.01}, jitters)
    assert verdicts(tmp_path, runs, "speed")["mini"] == Verdict.TIE


def test_rates_of_adam_and_sgd_beside_the_papers_do_not_speak_for_them(tmp_path: Path) -> None:
    runs = BASE + at_damping(0.1, 8, 50.0)
    runs += [replace(run, label="adam-fast", optimizer=ADAM | {"lr": 0.003}, losses=decay(1.0)) for run in BASE[:3]]
    runs += [replace(run, label="sgd-fast", optimizer=SGD | {"lr": 0.1}, losses=decay(1.0)) for run in BASE[:3]]
    (found,) = settings(load_logs(write_suite(tmp_path, runs)))
    assert (found.labels["adam"], found.labels["sgd"]) == ("adam", "sgd")


@pytest.mark.parametrize(
    ("last", "verdict"), [(0.503, Verdict.HOLDS), (0.55, Verdict.FAILS), (0.51, Verdict.UNDECIDED)]
)
def test_accuracy_saturates_if_the_later_epochs_add_no_point(last: float, verdict: Verdict, tmp_path: Path) -> None:
    runs = [
        Run([4.0] * 5, label, seed, optimizer, accuracies=[0.1, 0.5, 0.5, 0.5, last + 0.001 * seed])
        for label, optimizer in (("cao", CAO), ("adam", ADAM), ("sgd", SGD))
        for seed in range(3)
    ]
    assert verdicts(tmp_path, runs, "saturation")["mini"] == verdict


@pytest.mark.parametrize(("first", "verdict"), [(30.0, Verdict.HOLDS), (5.0, Verdict.FAILS)])
def test_a_spectrum_is_skewed_if_five_directions_leave_out_a_tenth(
    first: float, verdict: Verdict, tmp_path: Path
) -> None:
    runs = [
        Run([4.0, 3.0], label, seed, CAO | {"rank": rank}, eigenvalues=[first + seed, 4, -3, 2, 1.5, 1.0][: rank + 1])
        for label, rank in (("cao", 1), ("rank5", 5))
        for seed in range(3)
    ]
    assert verdicts(tmp_path, runs, "skew")["mini"] == verdict


def test_some_damping_always_suffices_and_it_is_said_which(tmp_path: Path) -> None:
    runs = [Run([4.0, 3.0], "cao", seed, CAO, eigenvalues=[-20.0 - seed, 1.0]) for seed in range(2)]
    verdict, told = by_part(tmp_path, runs, "sufficient damping")[""]
    assert verdict == Verdict.HOLDS
    assert "η > 21, and η was at most 0.1" in told


@pytest.mark.parametrize(
    ("half_life", "products", "verdict"),
    [(5.0, 5, Verdict.HOLDS), (8.0, 5, Verdict.FAILS), (5.0, 50, Verdict.FAILS)],
)
def test_adaptive_refresh_has_to_be_as_soon_and_to_cost_less(
    half_life: float, products: int, verdict: Verdict, tmp_path: Path
) -> None:
    rules = SGD | {"name": "cao-defaults", "refresh_every": None, "rank": products}
    runs = [
        Run(decay(half, jitter=jitter), label, seed, optimizer)
        for label, half, optimizer in (
            ("adaptive", half_life, rules),
            ("fixed", 5.0, rules | {"refresh_every": 40, "rank": 10}),
        )
        for seed, jitter in enumerate((-0.002, 0.0, 0.002))
    ]
    assert verdicts(tmp_path, runs, "adaptive refresh")["mini"] == verdict


def test_a_mean_of_many_pairs_is_compared_with_the_noise_of_such_a_mean(tmp_path: Path) -> None:
    """Run once more, single runs differ by 12 %; means of nine pairs differ by less than the margin of 10 %."""
    cells = {(damping, every): 5 + damping for damping in (0.001, 0.01, 0.1) for every in (200, 800)}
    jitters = dict.fromkeys((0.001, 0.01, 0.1), (-0.01, 0.0, 0.01))
    runs = sweep(cells, jitters)
    again = [
        replace(run, suite="paper", losses=decay(5 * (1.12 if run.seed else 1 / 1.05), 40))
        for run in runs
        if run.optimizer["damping"] == 0.1
    ]
    assert verdicts(tmp_path, runs + again, "refresh")["sensitivity"] == Verdict.FAILS


def test_every_claim_states_its_rule_and_the_papers_setting_is_always_listed(tmp_path: Path) -> None:
    found: DataFrame = audit(settings(load_logs(write_suite(tmp_path, methods({"cao": 5})))))
    assert all(len(claim.rule) > 80 for claim in CLAIMS)
    assert set(found["claim"]) == {claim.name for claim in CLAIMS}
    assert (found.loc[found["suite"] == "paper", "verdict"] == Verdict.UNTESTED).all()

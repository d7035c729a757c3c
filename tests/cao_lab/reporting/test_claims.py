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
    assert verdicts(tmp_path, runs, "damping and variance") == {"sensitivity": verdict}


def test_variance_takes_two_seeds(tmp_path: Path) -> None:
    assert verdicts(tmp_path, sweep(CELLS), "damping and variance") == {"sensitivity": Verdict.UNTESTED}


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
    assert verdicts(tmp_path, runs, "small damping") == {"sensitivity": verdict}


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


@pytest.mark.parametrize(("works_up_to", "verdict"), [(0.8, Verdict.HOLDS), (0.2, Verdict.FAILS), (0.1, Verdict.FAILS)])
def test_a_wider_window_of_rates_has_to_clear_the_margin(works_up_to: float, verdict: Verdict, tmp_path: Path) -> None:
    runs = rates("sgd", PLAIN, 0.2) + rates("cao", CURVED, works_up_to)
    assert verdicts(tmp_path, runs, "stable range") == {"stable-range": verdict}


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


def test_the_same_comparison_is_counted_once(tmp_path: Path) -> None:
    found = audit(settings(load_logs(write_suite(tmp_path, suite_of_runs()))))
    own = found[found["suite"] == "mini"].set_index("claim")["is_counted"]
    assert own[["speed", "factor", "threshold range", "early loss"]].tolist() == [True, False, False, True]


def test_every_claim_states_its_rule_and_the_papers_setting_is_always_listed(tmp_path: Path) -> None:
    found: DataFrame = audit(settings(load_logs(write_suite(tmp_path, methods({"cao": 5})))))
    assert all(len(claim.rule) > 80 for claim in CLAIMS)
    assert set(found["claim"]) == {claim.name for claim in CLAIMS}
    assert (found.loc[found["suite"] == "paper", "verdict"] == Verdict.UNTESTED).all()

import csv

import pytest

from cao_lab.config import Execution
from cao_lab.log.header import read_header
from cao_lab.suites import watch
from cao_lab.suites.watch import Above, Divergence, Spike, fixed, list_suite, rising, run_suite, unfinished


def first_step(alarm: Above, numbers: list[float]) -> int | None:
    for step, number in enumerate(numbers):
        alarm.hear(step, number)
    return alarm.step


def test_an_alarm_sounds_at_the_first_number_that_is_too_large_and_not_at_nan():
    assert first_step(Above(1), [0.5, float("nan"), 1.5, 3.0]) == 2


def test_a_spike_is_held_against_the_median_of_what_came_before():
    assert first_step(Spike(5), [1.0, 9.0] + [1.0] * 30 + [4.0, 6.0]) == 33
    assert first_step(Spike(5), [1.0] * 25 + [float("nan")]) == 25


@pytest.mark.parametrize(
    ("losses", "begun"),
    [
        ([2.0] * 20, None),
        ([2.0] * 10 + [0.1] * 10 + [1.0] * 9 + [0.1] * 10, None),
        ([2.0] * 10 + [0.1] * 10 + [1.0] * 12, 20),
        ([2.0] * 5 + [float("inf")], 5),
        ([2.0] * 15 + [3.0] * 10, 15),
    ],
)
def test_a_training_is_lost_where_its_loss_stays_far_above_the_best(losses, begun):
    divergence = Divergence()
    lost = next((step + 1 - divergence.bad for step, loss in enumerate(losses) if divergence.is_lost(loss)), None)
    assert lost == begun


def test_rates_rise_by_their_logarithms_or_are_warmed_up():
    assert [rising(10.0)(step) for step in (0, 400, 1_200)] == pytest.approx([0.01, 0.1, 10.0])
    assert [fixed(2.0)(step) for step in (0, 24, 49, 300)] == pytest.approx([0.04, 1.0, 2.0, 2.0])


def test_the_suite_writes_runs_and_looks_and_leaves_alone_what_is_there(tmp_path, monkeypatch):
    for name, value in {"RISING_STEPS": 40, "FIXED_STEPS": 15, "LONG_STEPS": 30, "SEEDS": range(1, 2)}.items():
        monkeypatch.setattr(watch, name, value)
    monkeypatch.setattr(watch, "TASKS", {"mlp": watch.TASKS["mlp"]})
    assert next(list_suite("watch", Execution(logs=tmp_path))) == "  to run   long/mlp/sgd/seed1"
    assert not (tmp_path / "watch").exists()
    assert run_suite("watch", Execution(logs=tmp_path), 1) == 0
    rows = list(csv.DictReader((tmp_path / "watch" / "runs.csv").open()))
    assert [row["schedule"] for row in rows] == ["rising", "third", "same"] * 2
    looks = list(csv.DictReader((tmp_path / "watch" / "looks.csv").open()))
    assert all(0.2 < float(look["seen"]) / float(look["true"]) < 1.01 for look in looks)
    assert {row["schedule"] for row in csv.DictReader((tmp_path / "watch" / "long" / "runs.csv").open())} == {"long"}
    header = read_header(tmp_path / "watch")
    assert (header["format"], header["kind"], header["suite"]) == (2, "alarms", "watch")
    assert unfinished(tmp_path / "watch" / "runs.csv", [1]) == []

"""The harness of `cao bench` at toy size: schema, names and machinery; no timing decides anything."""

import json

import pandas as pd
import pytest
from torch import nn

from cao_lab.bench import run
from cao_lab.bench.sizes import FULL, QUICK, Sizes
from cao_lab.reporting.analysis import usual_prices

TOY = Sizes(
    width=2, wide=None, batch=8, parts=2, step_width=0, small_tensors=10,
    step_rounds=1, refresh_rounds=1, optimizer_rounds=2, memory_rounds=1, default_steps=20, default_batch=4,
)  # fmt: skip


def small_network(_width, classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, classes)
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Measure everything on a small network, but memory, whose processes take seconds to start."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cao_lab.bench.memory.peak_bytes", lambda case, *_: {"bare": 10, "sgd": 30}.get(case, 50))
        for module in ("task", "step", "defaults"):
            patch.setattr(f"cao_lab.bench.{module}.seeded_resnet", small_network)
        run.measure(TOY, folder, "toy")
    return folder


@pytest.fixture(scope="module")
def rows(out):
    return {row["name"]: row for row in json.loads((out / "bench.json").read_text())}


def test_every_row_has_value_target_spread_unit_note_and_samples(rows):
    for row in rows.values():
        assert set(row) == {"name", "value", "target", "spread", "unit", "note", "samples"}
        assert row["value"] == row["value"]
        assert row["samples"] >= 1
        assert row["note"]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("epoch_time_over_sgd_k1_gauss_newton", 1.05),
        ("epoch_time_over_sgd_k5_gauss_newton", 1.15),
        ("memory_over_sgd_gauss_newton", 1.10),
        ("memory_over_sgd_parts", 1.10),
        ("memory_over_sgd_hessian", None),
        ("memory_over_sgd_default_rules", 1.10),
        ("step_over_sgd_k1", 2.7),
        ("default_rules_time_over_sgd_first", None),
        ("default_rules_time_over_sgd_later", 1.05),
        ("refresh_slope_in_k_gauss_newton", 1.1),
        ("step_over_sgd_k1_small_tensors", 3.0),
    ],
)
def test_every_question_has_its_row(rows, name, target):
    assert rows[name]["target"] == target


def test_the_report_finds_the_price_of_a_product(rows):
    prices = usual_prices(pd.DataFrame(list(rows.values())))
    assert prices["hessian"] == rows["hessian_product_per_gradient"]["value"]
    assert prices["gauss-newton"] == rows["gauss_newton_product_per_gradient"]["value"]


def test_memory_is_taken_without_the_bare_interpreter(rows):
    assert rows["memory_over_sgd_hessian"]["value"] == 2.0  # (50 − 10) / (30 − 10)


def test_the_first_sketch_of_the_default_rules_is_in_the_first_stretch(rows):
    first, later = (rows[f"default_rules_time_over_sgd_{stage}"]["note"] for stage in ("first", "later"))
    assert "steps 1 to 20: " in first
    assert "steps 21 to 40: " in later
    assert " 0 refreshes" not in first


def test_table_and_figure_stand_beside_the_rows(out, rows):
    lines = (out / "bench.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(rows) + 1
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_quick_and_the_full_benchmark_differ_in_size_only(monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(run, "measure", lambda sizes, out, title: measured.append(sizes) or [])
    run.run_bench(tmp_path, quick=True)
    run.run_bench(tmp_path, quick=False)
    assert measured == [QUICK, FULL]

"""The table of `cao theory`: complete, deterministic, and quoted truthfully by the document."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from cao_lab.theory import contraction, descent, stability
from cao_lab.theory.network import trained_network
from cao_lab.theory.table import lower_bound, prediction, refutation, upper_bound

DOCUMENT = Path(__file__).parents[3] / "docs" / "theory.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theory")
    # A fresh process is free of the run-time checks of shapes, which make each of 10⁴ small steps four times as long.
    code = "import sys, pathlib, cao_lab.theory as t; t.check_theory(*map(pathlib.Path, sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, folder, folder / "figures"], check=True)
    return folder


@pytest.fixture(scope="module")
def table(folder):
    return pd.read_csv(folder / "theory.csv")


@pytest.mark.slow
def test_the_table_has_its_columns_and_no_gaps(table):
    assert list(table.columns) == ["statement", "problem", "bound", "observed", "slack", "verdict"]
    assert table.notna().all(axis=None)


@pytest.mark.slow
def test_no_statement_of_ours_is_violated(table):
    ours = table[~table.statement.str.startswith("Printed")]
    assert set(ours.verdict) <= {"holds", "tight", "agrees"}


@pytest.mark.slow
def test_every_printed_statement_in_the_table_is_shown_false(table):
    printed = table[table.statement.str.startswith("Printed")]
    assert set(printed.verdict) == {"false as printed"}


@pytest.mark.slow
def test_every_figure_is_there_as_png_and_pdf(folder):
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = ("stable-range", "stationarity", "contraction", "sketch")
    assert names == {f"theory-{stem}.{suffix}" for stem in stems for suffix in ("png", "pdf")}


@pytest.mark.slow
def test_a_second_run_gives_the_same_rows(table):
    again = [*descent.rows(), *stability.narrow_gap(), *contraction.rows()]
    first = {(row.statement, row.problem): row.observed for row in table.itertuples()}
    for row in again:
        assert float(f"{row.observed:.6g}") == first[row.statement, row.problem]


@pytest.mark.slow
def test_the_document_names_every_statement_of_the_table(table):
    text = DOCUMENT.read_text(encoding="utf-8")
    missing = [name for name in set(table.statement) if f"`{name}`" not in text]
    assert not missing


@pytest.mark.slow
def test_every_number_in_bold_in_the_document_is_in_the_table(table):
    numbers = re.findall(r"\*\*(-?\d+(?:\.\d+)?)\*\*", DOCUMENT.read_text(encoding="utf-8"))
    values = [*table.bound, *table.observed]
    unknown = [n for n in numbers if not any(round(v, len(n.partition(".")[2])) == float(n) for v in values)]
    assert numbers
    assert not unknown


def test_the_row_of_many_trials_is_the_one_with_least_slack():
    assert upper_bound("", "", [(2.0, 1.0), (10.0, 9.0)]).observed == 9.0
    assert lower_bound("", "", [(1.0, 2.0), (9.0, 10.0)]).observed == 10.0


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (upper_bound("", "", [(1.0, 0.5)]), "holds"),
        (upper_bound("", "", [(1.0, 1.0)]), "tight"),
        (upper_bound("", "", [(1.0, 1.1)]), "violated"),
        (lower_bound("", "", [(0.0, -1.0)]), "violated"),
        (prediction("", "", [(1.0, 1.01)], 0.02), "agrees"),
        (prediction("", "", [(1.0, 0.9)], 0.02), "violated"),
        (refutation(upper_bound("", "", [(1.0, 1.1)])), "false as printed"),
        (refutation(upper_bound("", "", [(1.0, 0.9)])), "not refuted"),
    ],
)
def test_a_verdict_follows_from_bound_and_observation(row, verdict):
    assert row.verdict == verdict


def test_the_network_rests_at_a_strict_minimum():
    minimum = trained_network()
    minimum.network.place(minimum.point)
    assert minimum.network.gradient().norm() < 1e-12
    assert minimum.spectrum.min() > 1e-4

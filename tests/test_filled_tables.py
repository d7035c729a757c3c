"""Tables in the documentation are those that the logs give."""

import importlib.util
from pathlib import Path

import pytest

from cao_lab.log.sweeps import read_sweeps
from cao_lab.reporting.robust import contests, contests_table, goals_table
from cao_lab.reporting.scientific import load_solves
from cao_lab.reporting.scientific_tables import solver_tables
from cao_lab.reporting.tabular import write_table

ROOT = Path(__file__).parents[1]


def filled(page: str, tables: Path) -> str:
    spec = importlib.util.spec_from_file_location("fill_tables", ROOT / "scripts/fill_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.filled(page, tables)
    return text


def test_a_marked_place_gets_its_table_and_nothing_else_changes(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("new\n")
    page = "before\n<!-- table one -->\nold\n<!-- end -->\nafter <!-- table two"
    assert filled(page, tmp_path) == "before\n<!-- table one -->\nnew\n\n<!-- end -->\nafter <!-- table two"


@pytest.mark.parametrize("page", ["scientific-ml.md", "results.md"])
def test_the_page_shows_what_the_logs_say(page: str, tmp_path: Path) -> None:
    swept = contests(read_sweeps(ROOT / "logs/robust", []))
    for table in (*solver_tables(load_solves(ROOT / "logs", [])), goals_table(swept), contests_table(swept)):
        write_table(table, tmp_path)
    text = (ROOT / "docs" / page).read_text()
    assert filled(text, tmp_path) == text


def test_the_readme_says_of_the_comparison_what_its_page_says() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = [line.split(" | ") for line in (ROOT / "docs/scientific-ml.md").read_text().splitlines()]
    measured = {row[0].removeprefix("| "): row[2] for row in rows if len(row) == 5}
    assert "the median final loss of `SketchedLBFGS` is less than 1/1,000 of that of torch's L-BFGS" in readme
    assert float(measured["final loss against torch's L-BFGS"]) < 1 / 1000
    assert "the error of `SketchedLBFGS` is about that of the best of the ten other methods" in readme
    assert 0.8 < float(measured["L2 error against the best of all peers"]) < 1.2


def test_the_readme_says_of_the_defaults_what_the_logs_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    found = [one for one in contests(read_sweeps(ROOT / "logs/robust", [])) if one.method == "cao"]
    ours, base = (sum(rate.diverged for one in found for rate in getattr(one, side)) for side in ("ours", "base"))
    runs = sum(rate.seeds for one in found for rate in one.ours)
    assert f"With defaults, {ours} of {runs} runs on eight small problems diverged where {base} of SGD's did" in readme
    assert "at SGD's best rate the loss was the same or lower on seven" in readme
    assert sum(round(one.loss_ratio, 2) <= 1 for one in found) == 7

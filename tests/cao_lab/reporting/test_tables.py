"""Fixture logs small enough to read by eye give the stored tables, to the letter."""

from pathlib import Path

import pytest
from synthetic_logs import SGD, Run, write_run

from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.report import claims_markdown
from cao_lab.reporting.setting import settings
from cao_lab.reporting.tables import make_tables
from cao_lab.reporting.tabular import Table, latex, markdown, ratio, spread, write_table

FIXTURES = Path(__file__).with_name("fixtures")
NAN = float("nan")


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    logs = load_logs(FIXTURES / "logs")
    return {table.name: table for table in make_tables(logs, settings(logs))}


@pytest.mark.parametrize("name", ["final-accuracy", "results", "time-to-threshold", "threshold-sweep", "cost"])
def test_the_stored_table_comes_out_exactly(name: str, tables: dict[str, Table], tmp_path: Path) -> None:
    write_table(tables[name], tmp_path)
    for kind in ("md", "tex", "csv"):
        stored = (FIXTURES / "tables" / f"{name}.{kind}").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.{kind}").read_text(encoding="utf-8") == stored


def test_the_stored_audit_comes_out_exactly() -> None:
    found = claims_markdown(audit(settings(load_logs(FIXTURES / "logs"))))
    assert found == (FIXTURES / "claims.md").read_text(encoding="utf-8")


def test_who_never_arrived_is_said_so(tables: dict[str, Table]) -> None:
    cells = tables["time-to-threshold"].cells.set_index("Optimizer")["Epochs"]
    assert cells["SGD"] == "not reached (0 of 2 seeds)"
    assert cells["Adam"] == "4.00† (1 of 2 seeds)"
    assert cells["CAO k=1"] == "3.00 ± 0.00"


def test_a_diverged_run_is_counted_and_not_averaged(tables: dict[str, Table]) -> None:
    row = tables["results"].cells.set_index("Optimizer").loc["CAO k=5"]
    assert row["Diverged"] == "1 of 2"
    assert row["Test accuracy"] == "0.9100† (1 of 2 seeds)"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((19.0, 0.0, 3, 3), "19.00 ± 0.00"), ((19.0, NAN, 1, 1), "19.00†"),
     ((19.0, 1.0, 2, 3), "19.00 ± 1.00 (2 of 3 seeds)"),
     ((NAN, NAN, 0, 3), "not reached (0 of 3 seeds)")],
)  # fmt: skip
def test_a_spread_says_how_many_seeds_it_has(arguments: tuple[float, float, int, int], text: str) -> None:
    assert spread(*arguments) == text


def test_a_ratio_without_pairs_is_a_dash() -> None:
    assert [ratio(NAN, NAN, NAN), ratio(2.0, NAN, NAN), ratio(2.0, 1.5, 2.5)] == ["–", "2.00×†", "2.00× [1.50, 2.50]"]


def test_the_seed_that_chose_a_rate_is_in_no_table(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.9), (1, 0.1), (2, 0.2), (3, 0.3)):
        write_run(tmp_path, Run([4.0, 1.0], "sgd", seed, SGD, "mini-tuned", accuracies=[0.0, accuracy]))
    logs = load_logs(tmp_path)
    found = {table.name: table.cells.iloc[0] for table in make_tables(logs, settings(logs))}
    assert found["results"]["Test accuracy"] == "0.2000 ± 0.1000"
    assert found["final-accuracy"]["SGD"] == "0.2000 ± 0.1000"
    assert found["time-to-threshold"]["Epochs"] == "2.00 ± 0.00"


def test_special_characters_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, Run([1.0], label="cao-rank1"))
    logs = load_logs(tmp_path)
    cells = logs.runs[["label"]].assign(label="a_b & 50 % | c")
    assert r"a\_b \& 50 \% | c" in latex(Table("t", "caption", cells, cells))
    assert r"a_b & 50 % \| c" in markdown(cells)

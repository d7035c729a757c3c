"""Tables in the documentation are those that the logs give."""

import re
import runpy
from pathlib import Path

import pytest

from cao_lab.log.header import read_sweeps
from cao_lab.reporting.document import tables_of
from cao_lab.reporting.robust import duels

ROOT = Path(__file__).parents[1]


SCRIPT = runpy.run_path(str(ROOT / "scripts/fill_documents.py"))
filled = SCRIPT["filled"]


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    found: dict[str, str] = tables_of(ROOT / "logs")
    return found


def test_a_marked_place_gets_its_table_and_nothing_else_changes() -> None:
    page = "before\n<!-- table one -->\nold\n<!-- end -->\nafter <!-- table two"
    assert filled(page, {"one": "new\n"}) == "before\n<!-- table one -->\nnew\n\n<!-- end -->\nafter <!-- table two"


@pytest.mark.parametrize("page", SCRIPT["PAGES"], ids=lambda page: str(page.name))
def test_the_page_shows_what_the_logs_say(page: Path, tables: dict[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, tables) == text


def test_every_table_made_for_a_page_has_its_place(tables: dict[str, str]) -> None:
    shown = {match[2] for page in SCRIPT["PAGES"] for match in SCRIPT["MARKED"].finditer(page.read_text())}
    assert shown >= {name for name, text in tables.items() if text.startswith("|")}
    assert len(SCRIPT["PAGES"]) >= 2


def test_the_readme_says_of_the_comparison_what_its_page_says() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = [line.split(" | ") for line in (ROOT / "docs/solvers.md").read_text().splitlines()]
    measured = {row[0].removeprefix("| "): row[2] for row in rows if len(row) == 6}
    interval = {row[0].removeprefix("| "): row[3].replace(" – ", " to ") for row in rows if len(row) == 6}
    ratio = "final loss against torch's L-BFGS"
    assert f"final loss of `SketchedLBFGS` is {measured[ratio]} of that of torch's L-BFGS (median" in readme
    assert f"95 % over problems: {interval[ratio]};" in readme
    wrong = {row[0].removeprefix("| "): row[5] for row in rows if len(row) == 8}
    assert f"{wrong['SketchedLBFGS']} of its 24 runs there end at a wrong solution" in readme
    assert "the error of `SketchedLBFGS` is about that of the best of the ten other methods" in readme
    assert 0.8 < float(measured["L2 error against the best of all peers"]) < 1.2


def test_the_readme_says_of_the_defaults_what_the_logs_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    found = [one for one in duels(read_sweeps(ROOT / "logs/robust", [])) if one.method == "cao"]
    ours, base = (sum(rate.diverged for one in found for rate in getattr(one, side)) for side in ("ours", "base"))
    runs = sum(rate.seeds for one in found for rate in one.ours)
    assert f"With defaults, {ours} of {runs} runs on eight small problems diverged where {base} of SGD's did" in readme
    assert "at SGD's best rate the loss was the same or lower on seven" in readme
    assert sum(round(one.loss_ratio, 2) <= 1 for one in found) == 7


def test_the_readme_says_of_the_paper_and_of_the_sharpness_what_their_pages_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    page = (ROOT / "docs/paper.md").read_text()
    ratio = re.search(r"at η = 0\.1 Adam is faster \(Adam needs (\S+)× (\[[^]]+\])", page)
    assert ratio is not None
    assert f"Adam needs {ratio[1]} {ratio[2]} of CAO's epochs at a damping η of 0.1" in readme
    error = re.search(r"error of λ, median \| ≤ 0\.1 \| (\S+) ", (ROOT / "docs/sharpness.md").read_text())
    assert error is not None
    assert f"its λ is within {100 * float(error[1]):.1f} % of a converged one" in readme

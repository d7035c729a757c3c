"""docs/results.md agrees with the tables of the report, and the README with the audit."""

import re
from pathlib import Path

import pytest
from pandas import DataFrame

from cao_lab.reporting.claims import audit
from cao_lab.reporting.document import counted
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.setting import Setting, settings
from cao_lab.reporting.tables import make_tables
from cao_lab.reporting.verdicts import Verdict

ROOT = Path(__file__).parents[3]
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
TABLES = dict(re.findall(r"<!-- table ([\w-]+) -->\n((?:\|.*\n)+)", RESULTS))
TASK = "cifar100-resnet18w8-n5000"


@pytest.fixture(scope="module")
def found() -> list[Setting]:
    return settings(load_logs(ROOT / "logs"))


@pytest.fixture(scope="module")
def verdicts(found: list[Setting]) -> DataFrame:
    return audit(found)


@pytest.fixture(scope="module")
def report(found: list[Setting]) -> dict[str, DataFrame]:
    return {table.name: table.numbers for table in make_tables(load_logs(ROOT / "logs"), found)}


def cells(name: str) -> dict[str, list[str]]:
    rows = [line.strip("|").split(" | ") for line in TABLES[name].splitlines()[2:]]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_document_agrees_with_the_tables_of_the_report(report: dict[str, DataFrame]) -> None:
    own = report["results"]
    own = own[(own["suite"] == "mini") & (own["task"] == TASK)].set_index("name")
    times = report["time-to-threshold"]
    times = times[(times["suite"] == "mini") & (times["task"] == TASK)].set_index("name")
    for name, (loss, accuracy, epochs) in cells("mini").items():
        row, time = own.loc[name], times.loc[name]
        assert loss == f"{row['loss_mean']:.3f} ± {row['loss_std']:.3f}"
        assert accuracy == f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}"
        arrived = f"{time['epoch_mean']:.1f} ± {time['epoch_std']:.1f}"
        assert epochs == (arrived if time["reached"] else "not reached")
    assert len(cells("mini")) == len(own)


def test_the_page_counts_the_verdicts_as_the_audit_does(verdicts: DataFrame) -> None:
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    counts = {str(one): words[counted(verdicts).get(str(one), 0)] for one in Verdict}
    told = {
        one: f"{counts[one]} {verb if counts[one] in ('none', 'one') else plural}"
        for one, verb, plural in (
            (Verdict.FAILS, "does not hold", "do not hold"),
            (Verdict.RATE, "holds", "hold"),
            (Verdict.HOLDS, "holds", "hold"),
            (Verdict.UNDECIDED, "is undecided", "are undecided"),
        )
    }
    said = (
        f"{told[Verdict.FAILS]} there, {told[Verdict.RATE]} only because of the learning rate, {told[Verdict.HOLDS]}, "
        f"and {told[Verdict.UNDECIDED]}"
    )
    assert said in " ".join(RESULTS.split()).lower()


def test_the_readme_says_of_speed_what_the_audit_says(verdicts: DataFrame) -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    own = verdicts[(verdicts["claim"] == "speed") & (verdicts["suite"] == "mini") & (verdicts["task"] == TASK)]
    at_each = own.set_index("part")
    ratio = re.search(r"Adam needs ([\d.]+)× (\[[^\]]*\])", at_each.loc["η = 0.1", "evidence"])
    assert ratio
    assert f"Adam needs {ratio[1]} {ratio[2]} of CAO's epochs at a damping η of 0.1" in readme
    others = at_each.loc[[part for part in at_each.index if part != "η = 0.1"], "verdict"]
    assert "at 0.01 and 0.001 the two are not told apart" in readme
    assert (others == Verdict.UNDECIDED).all()

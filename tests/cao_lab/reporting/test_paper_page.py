"""The paper beside our runs: made-up logs, of which each cell can be worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, decay, write_suite

from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import load_logs
from cao_lab.reporting.paper_page import headline, paper_tables
from cao_lab.reporting.setting import settings

SMALL, NARROW = "cifar100-resnet18w8-n5000", "cifar100-resnet18w8"


def runs_of(suite: str, task: str, dampings: dict[float, float], seeds: int = 3, adam: float = 5.0) -> list[Run]:
    methods = {"adam": (ADAM, adam), "sgd": (SGD, 6.0)}
    for damping, half_life in dampings.items():
        cao = CAO | {"damping": damping, "max_update_norm": 5 / damping}
        methods |= {f"cao-{damping}": (cao, half_life), f"cao-rank0-{damping}": (cao | {"rank": 0}, half_life)}
    return [
        Run(decay(half_life, jitter=0.01 * (seed - 1)), label, seed, optimizer, suite, task)
        for label, (optimizer, half_life) in methods.items()
        for seed in range(seeds)
    ]


def page(folder: Path, runs: list[Run]) -> tuple[dict[str, DataFrame], str]:
    found = settings(load_logs(write_suite(folder, runs)))
    verdicts = audit(found)
    return paper_tables(found, verdicts, DataFrame()), headline(found, verdicts)


def test_each_damping_has_its_verdict_in_the_matrix(tmp_path: Path) -> None:
    tables, _ = page(tmp_path, runs_of("mini", SMALL, {0.1: 15.0, 0.01: 2.5}))
    row = tables["paper-matrix"].set_index("claim").loc["speed"]
    assert row["C100-R18, small"] == "🟥 does not hold: η = 0.1<br>🟨 by the rate: η = 0.01"
    assert row["C100-R18, full size"] == "–"


def test_verdicts_that_agree_are_told_once_and_uncounted_claims_have_a_star(tmp_path: Path) -> None:
    tables, _ = page(tmp_path, runs_of("mini", SMALL, {0.1: 15.0, 0.01: 14.0}))
    matrix = tables["paper-matrix"].set_index("claim")
    assert matrix.loc["speed", "C100-R18, small"] == "🟥 does not hold, at 2 η"
    assert "threshold range \\*" in matrix.index


def test_a_claim_is_shown_at_the_largest_size_at_which_it_was_judged(tmp_path: Path) -> None:
    runs = runs_of("mini", SMALL, {0.1: 15.0}) + runs_of("narrow", NARROW, {0.1: 2.5, 0.01: 2.0}, seeds=2)
    tables, text = page(tmp_path, runs)
    rows = tables["paper-claims"]
    speed = rows[rows["claim"] == "speed"]
    assert speed["size"].tolist() == [f"{NARROW}, 20 epochs"] * 2
    assert speed["η, or part"].tolist() == ["η = 0.1", "η = 0.01"]
    assert speed["log"].tolist() == [f"`logs/narrow/{NARROW}`"] * 2
    assert text.index("`cao suite narrow`") < text.index("`cao suite mini`")
    undone = rows[rows["claim"] == "adaptive refresh"].iloc[0]
    assert (undone["what would decide it"], undone["log"]) == ("a run at the paper's size: `make paper`", "none")


def test_the_headline_says_what_of_the_factor_has_been_tested(tmp_path: Path) -> None:
    _, small = page(tmp_path / "small", runs_of("mini", SMALL, {0.1: 50.0}, adam=20.0))
    assert small.startswith("**The paper's 2.95× itself has not been tested**")
    assert "at η = 0.1 Adam is faster (Adam needs 0." in small
    _, full = page(tmp_path / "full", runs_of("paper", "cifar100-resnet18", {0.1: 2.0}, adam=6.5))
    assert full.startswith("**The paper's 2.95×**: paper, η = 0.1: holds (To train loss 0.75, Adam needs 3.")


def test_runs_that_have_not_ended_are_told_and_not_judged(tmp_path: Path) -> None:
    """A suite under way: Adam has ended on one seed, CAO nowhere, so that nothing can be compared."""
    runs = [one for one in runs_of("narrow", NARROW, {0.1: 2.5}, seeds=2) if one.label in ("adam", "cao-0.1")]
    going = [
        replace(one, status="running", losses=one.losses[:4], budget=20) if one.label != "adam" or one.seed else one
        for one in runs
    ]
    tables, text = page(tmp_path, going)
    (row,) = tables["paper-progress"].to_dict("records")
    assert row["runs ended"] == "1"
    assert "CAO k=1, seed 0: epoch 4 of 20, loss " in row["not ended, not judged"]
    assert tables["paper-matrix"].set_index("claim").loc["speed", "C100-R18, width 8"] == "–"
    assert "`cao suite narrow`" not in text
    accuracy = tables["paper-accuracy"].set_index("setting")
    ours = accuracy.loc[f"`narrow`, {NARROW}, 20 epochs, –"]
    assert (ours["Adam"].endswith("(n = 1)"), ours["CAO"]) == (True, "–")


def test_the_early_figure_ends_at_forty_per_cent_of_the_budget(tmp_path: Path) -> None:
    tables, _ = page(tmp_path, [Run([5.0, 4.0, 3.0, 2.0, 1.0], "sgd", seed, SGD, task=SMALL) for seed in range(2)])
    ends = tables["paper-figures"].set_index("figure")["ours, where it ends"]
    assert ends["1"] == "SGD 1.000 ± 0.000 (n = 2)"
    assert ends["2"] == "SGD 4.000 ± 0.000 (n = 2)"


@pytest.mark.parametrize(("seeds", "told"), [(3, "n = 3 + 3"), (1, "n = 1 + 1")])
def test_a_table_of_thresholds_states_its_seeds(seeds: int, told: str, tmp_path: Path) -> None:
    tables, _ = page(tmp_path, runs_of("mini", SMALL, {0.1: 6.0}, seeds=seeds))
    rows = tables["paper-thresholds"]
    assert rows["Adam/CAO"].tolist()[:3] == ["1.64×", "1.94×", "2.95×"]
    assert all(told in cell for cell in rows["Adam/CAO"][3:])

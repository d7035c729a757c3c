import pandas as pd

from cao_lab.reporting.alarms import ALARMS, heard, is_reached, readings_in, sharpness_figure, watch_tables


def runs(*pairs: tuple[float | None, float | None]) -> pd.DataFrame:
    """Return runs by the step at which they diverged and the one at which an alarm sounded."""
    return pd.DataFrame([{"diverged": lost, "gradient 5": alarm} for lost, alarm in pairs], dtype=float)


def test_an_alarm_is_ahead_false_or_late():
    found = heard(runs((100, 60), (100, 95), (100, None), (20, 1), (None, 5), (None, None)), "gradient 5")
    assert (found.ahead, found.diverged, found.false, found.others) == (1, 3, 1, 2)
    assert found.lead == 5


def test_goals_are_read_from_their_words():
    assert [is_reached(goal, 0.1) for goal in ("≤ 0.1", "≥ 0.8", "> 0", "")] == ["yes", "no", "yes", ""]


def test_a_damaged_log_costs_itself_and_a_sentence(tmp_path):
    folder = tmp_path / "watch"
    folder.mkdir()
    (folder / "runs.csv").write_text("task,diverged\nmlp,soon\n")
    (folder / "looks.csv").write_text("seen,true\n1,1\n")
    missing: list[str] = []
    assert watch_tables(tmp_path, missing) == []
    assert len(missing) == 1
    assert missing[0].startswith("watch: ")


def test_the_tables_judge_accuracy_by_long_runs_and_alarms_by_the_others(tmp_path):
    shares = {f"{kind} {name}": 0.009 for kind in ("share", "looks") for name in ("1%", "10%")}
    row = {"optimizer": "sgd", "diverged": 100.0} | dict.fromkeys(ALARMS, 50.0) | shares
    for folder, error in (("watch", 0.5), ("watch/long", 0.05)):
        (tmp_path / folder).mkdir()
        pd.DataFrame([row]).to_csv(tmp_path / folder / "runs.csv")
        looks = [{"budget": name, "seen": 1 - error, "true": 1.0} for name in ("1%", "10%")]
        pd.DataFrame(looks).to_csv(tmp_path / folder / "looks.csv")
    goals, alarms = watch_tables(tmp_path, [])
    assert goals.cells["at 1 %"].tolist() == ["0.05", "0.009", "0.009", "1", "0", "50"]
    assert goals.cells["reached at 1 %"].tolist() == ["yes", "yes", "", "yes", "yes", "no"]
    assert alarms.cells["at least 10 steps ahead"].tolist() == ["1 of 1"] * len(ALARMS)


def test_what_a_sharpness_wrote_beside_the_logs_is_drawn(tmp_path):
    row = {"step": 10, "sharpness": 3.0, "preconditioned": 3.0, "ratio": 0.5, "lr": 0.1, "edge": 6.0}
    pd.DataFrame([row, row | {"step": 20, "ratio": 1.5}]).to_csv(tmp_path / "watch.csv")
    (above, below) = sharpness_figure(readings_in(tmp_path, [])).axes
    assert below.get_lines()[0].get_ydata().tolist() == [0.5, 1.5]
    assert above.get_lines()[1].get_ydata().tolist() == [6.0, 6.0]


def test_a_file_that_no_sharpness_wrote_is_told_of(tmp_path):
    (tmp_path / "watch.csv").write_text("a,b\n1,2\n")
    missing = []
    assert readings_in(tmp_path, missing) is None
    assert missing[0].startswith("watch.csv: ")
    assert readings_in(tmp_path / "empty", []) is None

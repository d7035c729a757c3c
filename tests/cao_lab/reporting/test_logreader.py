"""Logs are read whatever state they are in, and what is missing is said."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic_logs import ADAM, CAO, SGD, Run, write_run, write_suite

from cao_lab.reporting.logreader import ReportError, load_logs
from cao_lab.reporting.setting import settings
from cao_lab.reporting.tables import make_tables


def test_one_row_an_epoch_with_the_configuration_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0, 2.0, 1.0]))
    table = load_logs(tmp_path).epochs
    assert list(table["train_loss"]) == [3.0, 2.0, 1.0]
    assert list(table["seconds"]) == [2.0, 4.0, 6.0]
    assert table.loc[0, ["suite", "optimizer", "rank", "damping", "base_lr"]].tolist() == ["mini", "cao", 1, 0.1, 0.01]


def test_an_empty_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no runs in .*: run `cao suite demo` first"):
        load_logs(tmp_path)


def test_a_folder_that_is_not_there_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a folder"):
        load_logs(tmp_path / "nowhere")


def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([3.0, 2.0, 1.0]))
    text = (folder / "epochs.csv").read_text()
    (folder / "epochs.csv").write_text(text[:-30])
    logs = load_logs(tmp_path)
    assert list(logs.epochs["train_loss"]) == [3.0, 2.0]
    assert any("last line of epochs.csv is torn" in sentence for sentence in logs.missing)


@pytest.mark.parametrize("keep", range(0, 400, 7))
def test_a_csv_cut_at_any_byte_is_read(keep: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([3.0, 2.0, 1.0]))
    (folder / "epochs.csv").write_bytes((folder / "epochs.csv").read_bytes()[:keep])
    assert len(load_logs(tmp_path).epochs) <= 3


def test_a_run_without_epochs_is_there_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([3.0], status="running", budget=20))
    (folder / "epochs.csv").unlink()
    logs = load_logs(tmp_path)
    assert len(logs.runs) == 1
    assert logs.missing == ("mini/cifar100-resnet18w16-n5000/cao-rank1/seed0: running after 0 of 20 epochs",)


def test_a_finished_run_that_lost_rows_does_not_count_and_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([3.0, 2.0, 1.0]))
    lines = (folder / "epochs.csv").read_text().splitlines(keepends=True)
    (folder / "epochs.csv").write_text("".join(lines[:2] + lines[3:]))
    logs = load_logs(tmp_path)
    assert not logs.epochs["has_ended"].any()
    assert len(logs.missing) == 1
    assert "cao-rank1/seed0: finished, but epochs.csv is not whole (2 of 3 epochs), left out" in logs.missing[0]


def test_a_copy_of_a_run_is_no_further_seed(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0, 2.0, 1.0]))
    shutil.copytree(tmp_path / "mini", tmp_path / "mini-backup")
    logs = load_logs(tmp_path)
    assert len(logs.runs) == 1
    assert len(logs.missing) == 1
    assert "the same run as mini/" in logs.missing[0]


@pytest.mark.parametrize("seed", ["x", None])
def test_a_seed_that_is_no_number_costs_its_run(seed: object, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    folder = write_run(tmp_path, Run([3.0], seed=1))
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(header | {"seed": seed}))
    logs = load_logs(tmp_path)
    assert len(logs.runs) == 1
    assert "seed1: run.json cannot be read" in logs.missing[0]


@pytest.mark.parametrize("header", ["", "{", "[]", '{"format": 2}', '{"format": 1}'])
def test_a_run_that_cannot_be_known_is_left_out_and_said(header: str, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    folder = write_run(tmp_path, Run([3.0], seed=1))
    (folder / "run.json").write_text(header)
    logs = load_logs(tmp_path)
    assert list(logs.runs["seed"]) == [0]
    assert any("seed1: run.json cannot be read" in sentence for sentence in logs.missing)


def test_epochs_without_a_header_are_left_out_and_said(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (write_run(tmp_path, Run([3.0], seed=1)) / "run.json").unlink()
    assert any("seed1: no run.json" in sentence for sentence in load_logs(tmp_path).missing)


def test_missing_seeds_are_said(tmp_path: Path) -> None:
    write_suite(tmp_path, [Run([3.0], "adam", seed, ADAM) for seed in (0, 1, 2)] + [Run([3.0], seed=1)])
    assert load_logs(tmp_path).missing == ("mini/cifar100-resnet18w16-n5000/cao-rank1: 1 of 3 seeds, without 0, 2",)


def test_a_diverged_run_keeps_its_rows_and_its_nan(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0, math.nan], status="diverged", budget=20))
    logs = load_logs(tmp_path)
    assert math.isnan(logs.epochs["train_loss"].iloc[-1])
    assert logs.runs["final_train_loss"].tolist() == [math.inf]


def test_automatic_damping_is_that_of_each_refresh(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([3.0], optimizer=CAO | {"damping": "auto"}, eigenvalues=[5.0]))
    (folder / "refreshes.csv").write_text((folder / "refreshes.csv").read_text().replace("auto", "0.7"))
    logs = load_logs(tmp_path)
    assert math.isnan(logs.runs["damping"].iloc[0])
    assert logs.refreshes["damping"].tolist() == [0.7]


def test_names_leave_out_what_siblings_share(tmp_path: Path) -> None:
    every40 = CAO | {"refresh_every": 40}
    labels = {
        "cao-rank1-refresh_every40": every40, "cao-rank3-refresh_every40": every40 | {"rank": 3},
        "cao-rank1-refresh_every40-sketch=projected-out": every40 | {"sketch": "projected-out"},
        "sgd": SGD, "sgd-lr1e-05-momentum0": SGD | {"lr": 1e-5, "momentum": 0.0},
        "sgd-max_gradient_norm=none": SGD | {"max_gradient_norm": None},
    }  # fmt: skip
    runs = load_logs(write_suite(tmp_path, [Run([3.0], label, 0, config) for label, config in labels.items()])).runs
    assert dict(zip(runs["label"], runs["name"], strict=True)) == {
        "cao-rank1-refresh_every40": "CAO k=1",
        "cao-rank3-refresh_every40": "CAO k=3",
        "cao-rank1-refresh_every40-sketch=projected-out": "CAO k=1, sketch projected-out",
        "sgd": "SGD",
        "sgd-lr1e-05-momentum0": "SGD, lr 1e-05, momentum 0",
        "sgd-max_gradient_norm=none": "SGD, max gradient norm none",
    }


def test_two_methods_never_share_a_name(tmp_path: Path) -> None:
    runs = [Run([3.0], "sgd", 0, SGD), Run([3.0], "sgd-mine2", 0, SGD | {"mine": 3})]
    found = load_logs(write_suite(tmp_path, runs)).runs
    assert found["name"].tolist() == ["SGD (sgd)", "SGD (sgd-mine2)"]


def test_theory_and_bench_are_read_where_they_are(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / "theory.csv").write_text("statement,verdict\nLemma 1,holds\n")
    (tmp_path / "bench.json").write_text(json.dumps([{"name": "step", "value": 1.5}]))
    logs = load_logs(tmp_path)
    assert logs.theory["verdict"].tolist() == ["holds"]
    assert logs.bench["value"].tolist() == [1.5]


@pytest.mark.parametrize("rows", ['[{"a": 1}]', '{"name": "x"}', '[{"name": "step", "value": "fast"}]'])
def test_rows_of_a_benchmark_without_name_and_value_are_left_out(rows: str, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / "bench.json").write_text(rows)
    logs = load_logs(tmp_path)
    assert logs.bench.empty
    assert "bench.json cannot be read" in logs.missing[0]


def test_broken_files_beside_the_runs_cost_a_sentence_each(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / "bench.json").write_text("[{")
    (tmp_path / "theory.csv").write_text("")
    logs = load_logs(tmp_path)
    assert logs.bench.empty
    assert logs.theory.empty
    assert [sentence.split(" (")[0] for sentence in logs.missing] == [
        "theory.csv cannot be read", "bench.json cannot be read",
    ]  # fmt: skip


def test_a_run_resumed_on_other_code_is_marked_in_every_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([2.2, 1.0], "sgd-0.1", 0, SGD, "stable-range", "digits-mlp"))
    header = json.loads((folder / "run.json").read_text())
    header["resumed"] = [{"at": "2000-01-02T00:00:00Z", "git_commit": "4567def"}]
    (folder / "run.json").write_text(json.dumps(header))
    logs = load_logs(tmp_path)
    assert any("resumed on other code (0123abc, 4567def), marked ‡" in sentence for sentence in logs.missing)
    for table in make_tables(logs, settings(logs)):
        assert "‡" in table.cells.to_string(), table.name
        assert "resumed on other code" in table.caption


def test_a_run_resumed_on_the_same_code_is_not_marked(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Run([2.2, 1.0]))
    header = json.loads((folder / "run.json").read_text())
    header["resumed"] = [{"at": "2000-01-02T00:00:00Z", "git_commit": header["git_commit"]}]
    (folder / "run.json").write_text(json.dumps(header))
    assert load_logs(tmp_path).runs["name"].tolist() == ["CAO k=1"]


def test_folders_within_folders_without_end_are_refused_in_words(tmp_path: Path) -> None:
    opened = [os.open(tmp_path, os.O_RDONLY)]
    try:
        for _ in range(1500):  # More levels than a path has room for in one call.
            os.mkdir("a", dir_fd=opened[-1])
            opened.append(os.open("a", os.O_RDONLY, dir_fd=opened[-1]))
            os.close(opened.pop(-2)) if len(opened) > 2 else None
        with pytest.raises(ReportError, match=r"a thousand deep|no runs in"):
            load_logs(tmp_path)
    finally:
        for one in opened:
            os.close(one)
        subprocess.run(["rm", "-rf", tmp_path / "a"], check=True)  # Deeper than shutil.rmtree goes.

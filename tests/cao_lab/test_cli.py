import csv
import os
import shlex
import signal
import subprocess
import sys
from importlib import metadata

import pandas as pd
import pytest
import torch

import cao_lab.bench.run as bench
from cao_lab import theory
from cao_lab.bench.rows import Row
from cao_lab.cli import main
from cao_lab.facts import SUITES
from cao_lab.log import writing
from cao_lab.log.header import read_header
from cao_lab.log.writing import RunLog
from cao_lab.runs import checkpoint, session
from cao_lab.runs.stopping import stop_requests

FOLDER = "runs/digits-mlpw8/sgd/seed0"
SHORT = ["train", "sgd", "--epochs", "2", "--width", "8"]


@pytest.fixture
def cao(tmp_path, capsys, monkeypatch):
    """Return a function that runs a command and gives its exit code and what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        said = capsys.readouterr()
        return exit_.value.code, said.out + said.err

    return run


def test_training_leaves_a_log_and_says_where(cao, tmp_path):
    code, said = cao(*SHORT)
    rows = list(csv.DictReader((tmp_path / "logs" / FOLDER / "epochs.csv").open()))
    losses = f"train loss {float(rows[-1]['train_loss']):.4g}, test loss {float(rows[-1]['test_loss']):.4g}"
    reached = f"{losses}, test accuracy {float(rows[-1]['test_accuracy']):.4g}"
    assert (code, said) == (0, f"finished after 2 of 2 epochs, {reached}: logs/{FOLDER}\n")
    header = read_header(tmp_path / "logs" / FOLDER)
    assert header["status"] == "finished"
    assert header["command"] == "cao train sgd --epochs 2 --width 8"
    assert header["steps_per_epoch"] == 12
    assert len((tmp_path / "logs" / FOLDER / "epochs.csv").read_text().splitlines()) == 3


def test_a_finished_run_is_left_alone(cao):
    cao(*SHORT)
    assert cao(*SHORT) == (0, f"logs/{FOLDER} has already finished\n")


def test_another_config_in_the_same_folder_is_refused_with_the_difference(cao):
    cao(*SHORT)
    code, said = cao("train", "sgd", "--epochs", "3", "--width", "8")
    assert code == 2
    assert "epochs: 2 in the log, 3 now" in said
    assert said.count("\n") == 1


def test_a_folder_in_use_is_refused(cao, tmp_path):
    with RunLog(tmp_path / "logs" / FOLDER):
        code, said = cao(*SHORT)
    assert code == 2
    assert "another process is working on" in said


def test_divergence_has_a_code_of_its_own(cao, tmp_path):
    arguments = ["train", "sgd", "--lr", "1e30", "--max-gradient-norm", "None"]
    code, said = cao(*arguments)
    assert code == 3
    assert "the loss became non-finite in epoch 1" in said
    assert read_header(next(tmp_path.glob("logs/*/*/*/*")))["status"] == "diverged"
    assert cao(*arguments)[0] == 3


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(cao, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    cao(*SHORT)
    folder = tmp_path / "logs" / FOLDER
    expected = [line.split(",")[:6] for line in (folder / "epochs.csv").read_text().splitlines()]

    def die(*_):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "finish", die)
        patch.chdir(tmp_path.joinpath("again").mkdir() or tmp_path / "again")
        with pytest.raises(RuntimeError, match="power cut"):
            main(SHORT)
    again = tmp_path / "again/logs" / FOLDER
    assert read_header(again)["status"] == "failed"
    checkpoint.current(again).write_bytes(b"torn")
    code, said = cao(*SHORT, "--logs", str(tmp_path / "again/logs"))
    assert code == 0
    assert "checkpoint.pt is damaged" in said
    assert [sorted(one) for one in read_header(again)["resumed"]] == [
        ["arithmetic", "at", "device", "git_commit", "processor", "ranks", "threads", "versions"]
    ]
    assert [line.split(",")[:6] for line in (again / "epochs.csv").read_text().splitlines()] == expected


@pytest.fixture
def interrupted(cao, tmp_path, monkeypatch):
    """Return the folder of a run that was killed before its end, with two checkpoints."""
    monkeypatch.setattr(session, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(SHORT)
    return tmp_path / "logs" / FOLDER


def damaged(**changes):
    """Return a function that changes entries of a state below `training`."""

    def change(saved):
        saved["training"].update(changes)

    return change


NOT_WHOLE = {
    "no training": lambda saved: saved.pop("training"),
    "no rows": lambda saved: saved.pop("rows"),
    "text for rows": lambda saved: saved.update(rows="two"),
    "rows of another run": lambda saved: saved.update(rows={"epochs": 7, "refreshes": 0}),
    "fewer than no rows": lambda saved: saved["rows"].update(refreshes=-1),
    "no model": lambda saved: saved["training"].pop("model"),
    "a layer less": lambda saved: saved["training"]["model"].popitem(),
    "another shape": lambda saved: saved["training"]["model"].update({"1.weight": torch.zeros(3)}),
    "text for the model": damaged(model="model"),
    "no optimizer": lambda saved: saved["training"].pop("optimizer"),
    "no groups": lambda saved: saved["training"]["optimizer"].pop("param_groups"),
    "beyond the end": lambda saved: saved["training"]["progress"].update(epoch=99),
    "another step": lambda saved: saved["training"]["progress"].update(step=5),
    "text for a number": lambda saved: saved["training"]["progress"].update(samples="many"),
    "an unknown field": lambda saved: saved["training"]["progress"].update(age=3),
    "a short random state": damaged(random=torch.zeros(3, dtype=torch.uint8)),
    "text for seconds": damaged(seconds="long"),
    "nothing": lambda saved: saved.clear(),
}


@pytest.mark.parametrize("change", NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_a_checkpoint_that_loads_but_is_not_whole_is_passed_over(cao, interrupted, change):
    for path in (checkpoint.current(interrupted), checkpoint.previous(interrupted)):
        saved = checkpoint.read(path)
        change(saved)
        torch.save(saved, path)
    code, said = cao(*SHORT)
    assert code == 0
    assert said.count("is not whole") == 2
    assert said.count("\n") == 3
    assert "finished after 2 of 2 epochs" in said


@pytest.mark.parametrize(
    "change", [lambda saved: saved.clear(), lambda saved: saved["training"]["model"].popitem()], ids=["empty", "layer"]
)
def test_a_spectrum_needs_a_checkpoint_that_is_whole(cao, interrupted, change):
    saved = checkpoint.read(checkpoint.current(interrupted))
    change(saved)
    checkpoint.save(saved, interrupted)
    checkpoint.forget_previous(interrupted)
    code, said = cao("spectrum", str(interrupted))
    assert code == 2
    assert "is not whole" in said
    assert "has no checkpoint.pt that is whole" in said
    assert said.count("\n") == 2


def test_a_run_goes_on_only_from_a_log_that_is_whole(cao, interrupted):
    path = interrupted / "epochs.csv"
    whole = path.read_text()
    path.write_text(whole.replace("train_loss", "train_lass"))
    code, said = cao(*SHORT)
    assert code == 2
    assert "epochs.csv does not begin with the names of its columns" in said
    assert said.count("\n") == 1
    path.write_text(whole)
    assert cao(*SHORT)[0] == 0


def test_a_full_disk_ends_the_run_in_one_line(cao, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    code, said = cao(*SHORT)
    assert code == 2
    assert "the disk is full" in said
    assert read_header(tmp_path / "logs" / FOLDER)["status"] == "failed"


def test_a_mistake_of_ours_keeps_its_traceback(cao, tmp_path, monkeypatch):
    monkeypatch.setattr(session.Session, "begin", lambda _: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        main(SHORT)
    monkeypatch.setattr(session.Session, "run", lambda _: (tmp_path / "not" / "there").read_text())
    with pytest.raises(FileNotFoundError):
        main([*SHORT, "--seed", "1"])
    assert "FileNotFoundError" in (tmp_path / "logs" / FOLDER.replace("seed0", "seed1") / "traceback.txt").read_text()


def test_a_run_whose_first_header_could_not_be_written_can_be_begun_again(cao, monkeypatch):
    with monkeypatch.context() as patch:

        def full(*_):
            patch.undo()
            raise OSError(28, "No space left on device")

        patch.setattr(writing, "sync", full)
        assert cao(*SHORT)[0] == 2
    assert cao(*SHORT)[0] == 0


COMMAND = "from cao_lab.cli import main; main()"


def shell(folder, command, **environment):
    """Run a command as a shell does that closes streams, or that has another locale."""
    run = f"{shlex.quote(sys.executable)} -c {shlex.quote(COMMAND)} {command}"
    setting = {**os.environ, **environment}
    return subprocess.run(run, shell=True, cwd=folder, env=setting, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train sgd --epochs 1 --width 8 >&- 2>&-", 0),
        ("train sgd --epochs 0 2>&-", 2),
        ("train sgd --epochs 0 2>/dev/full", 2),
        ("solve regression --evaluations 3 2>&-", 0),
    ],
)
def test_closed_and_full_streams_do_not_end_a_command(tmp_path, command, code):
    assert shell(tmp_path, command).returncode == code


def test_help_is_shown_by_a_terminal_that_has_no_greek_letters(tmp_path):
    shown = shell(tmp_path, "train sgd --help", PYTHONIOENCODING="ascii")
    assert (shown.returncode, b"--momentum" in shown.stdout) == (0, True)


def test_help_comes_to_an_end_in_three_columns(tmp_path):
    assert shell(tmp_path, "suite --help", COLUMNS="3").returncode == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_unless_nohup_holds(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stop_requests() as request:
            assert ignored or callable(signal.getsignal(signal.SIGHUP))
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.signal == (0 if ignored else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_dry_run_without_data_says_how_to_get_them(cao, monkeypatch):
    monkeypatch.delenv("CAO_DATA", raising=False)
    code, said = cao("suite", "paper", "--dry-run")
    assert code == 0
    last = said.splitlines()[-1]
    assert "0 s in all" not in said
    assert "cao data cifar10 --data-dir DIR; cao data cifar100 --data-dir DIR" in last


def test_help_says_what_each_suite_is(cao, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, said = cao("suite", "--help")
    for name, info in SUITES.items():
        assert f"{name}: {info.about}" in " ".join(said.replace("│", " ").split())


def test_quick_figures_are_not_held_against_targets(cao, monkeypatch):
    monkeypatch.setattr(bench, "run_bench", lambda *_: [Row("one", 2.0, 1.0, None, "ratio", "", 1)])
    assert "targets missed" not in cao("bench", "--quick")[1]
    assert "1 targets missed" in cao("bench")[1]


def test_the_theory_is_summed_up_first_and_fits_the_terminal(cao, monkeypatch):
    row = {"statement": "a long statement " * 9, "problem": "one " * 30, "bound": 1.0, "observed": 0.123456789}
    table = pd.DataFrame([row | {"slack": 0.1, "verdict": verdict} for verdict in ("holds", "holds", "violated")])
    monkeypatch.setattr(theory, "check_theory", lambda *_: table)
    lines = cao("theory")[1].splitlines()
    assert lines[0].startswith("3 statements: 2 holds, 1 violated; see logs/theory.csv")
    assert max(map(len, lines)) <= 100


def test_the_version_is_that_of_the_distribution(cao):
    assert cao("--version") == (0, f"cao {metadata.version('cao-optimizer')}\n")


def test_a_mistyped_flag_gets_a_suggestion(cao):
    code, said = cao("train", "sgd", "--epoch", "3")
    assert code == 2
    assert "--epochs" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lbfgs"], "cao: lbfgs needs the whole training set in a step: add --batch-size None"),
        (["train", "sgd", "--epochs", "0"], "cao: epochs must be at least 1, got 0"),
        (["train", "cao", "--damping", "-1"], "cao: damping must be"),
        (["train", "sgd", "--dataset", "cifar10"], "cao: cifar10 needs --data-dir DIR or $CAO_DATA"),
        (["train", "sgd", "--train-samples", "5"], "cao: train_samples must be from"),
        (["suite", "nonsense"], "cao: no suite is called nonsense"),
        (["suite", "demo", "--jobs", "0"], "cao: jobs must be at least 1, got 0"),
        (["suite", "scientific", "--jobs", "0", "--dry-run"], "cao: jobs must be at least 1, got 0"),
        (["suite", "robust", "--jobs", "-1", "--dry-run"], "cao: jobs must be at least 1, got -1"),
    ],
)
def test_wrong_input_is_answered_in_one_line_and_leaves_nothing_behind(cao, tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("CAO_DATA", raising=False)
    code, said = cao(*arguments)
    assert code == 2
    assert said.startswith(message)
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", ["demo", "scientific", "robust"])
def test_a_suite_whose_logs_cannot_be_written_ends_before_its_first_run(cao, tmp_path, suite):
    logs = tmp_path / "logs"
    logs.symlink_to(logs)
    code, said = cao("suite", suite, "--logs", str(logs))
    assert code == 2
    assert said.startswith("cao: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["train"], ["train", "cao"], ["suite"], ["report"], ["theory"], ["data"]])
def test_every_command_has_help(cao, command):
    code, said = cao(*command, "--help")
    assert code == 0
    assert "usage: cao" in said


def test_help_does_not_wait_for_torch():
    script = "import sys, cao_lab.cli, cao_lab.suites.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_tensorboard_gets_the_rows(cao, tmp_path):
    assert cao(*SHORT, "--tensorboard")[0] == 0
    assert list((tmp_path / "logs" / FOLDER / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("command", ["solve regression --out", "theory --out", "suite demo --logs"])
def test_a_file_in_the_place_of_the_output_is_refused_before_anything_is_computed(cao, tmp_path, command):
    (tmp_path / "taken").write_text("mine")
    code, said = cao(*command.split(), "taken")
    assert code == 2
    assert said == "cao: a folder is needed for the output, and taken is a file or lies below one\n"
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_watched_training_is_drawn(cao, tmp_path):
    fields = "step,sharpness,preconditioned,edge,ratio,lr,residual,products,seconds,share"
    (tmp_path / "watch.csv").write_text(f"{fields}\n0,4.0,5.0,20.0,0.25,0.1,0.1,3,0.5,0.01\n")
    code, said = cao("watch", "watch.csv")
    assert (code, said.splitlines()) == (
        0,
        ["step 0: sharpness 4 at lr 0.1, 0.25 of the edge (3 products, 1.0% of the time)", "written to out/watch.png"],
    )
    assert (tmp_path / "out/watch.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_log_of_a_watch_is_refused_in_one_line(cao, tmp_path):
    (tmp_path / "watch.csv").write_text("a,b\n1,2\n")
    code, said = cao("watch", "watch.csv")
    assert code == 2
    assert said.startswith("cao: watch.csv is no log of readings ('step'); write one with Sharpness(")

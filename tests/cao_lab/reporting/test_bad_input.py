"""One bad folder costs its run and one sentence, never the report."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pandas import DataFrame
from synthetic_logs import ADAM, Run, header, write_run

from cao_lab.cli import main
from cao_lab.reporting.beside import load_bench, load_theory
from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import Logs, load_logs
from cao_lab.reporting.page import beside, page
from cao_lab.reporting.report import claims_markdown, figures_of
from cao_lab.reporting.setting import settings as settings_of
from cao_lab.reporting.tables import make_tables
from cao_lab.reporting.tabular import latex, markdown

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def two_runs(folder: Path) -> Path:
    """Write a sound run and one to be damaged, and return the folder of the latter."""
    write_run(folder, Run([3.0, 2.0, 1.0], "adam", 0, ADAM, task="digits-mlp"))
    return write_run(folder, Run([3.0, 2.0, 1.0], task="digits-mlp", eigenvalues=[4.0, 2.0]))


def write_all_but_figures(folder: Path) -> Logs:
    """Make everything that a report has to say, as it goes to disk."""
    logs = load_logs(folder)
    found = settings_of(logs)
    tables, verdicts = make_tables(logs, found), audit(found)
    texts = [page(logs, found, tables, verdicts, []), claims_markdown(verdicts)]
    texts += [text for table in tables for text in (latex(table), markdown(table.cells))]
    assert "\n".join(texts).encode()
    return logs


def with_header(config: dict[str, Any] | None = None, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "run.json").read_text())
        content["config"] |= config or {}
        (folder / "run.json").write_text(json.dumps(content | changes))

    return damage


def with_directory(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def with_circle(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return damage


def with_row(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_text()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1).encode())

    return damage


def with_nesting(folder: Path) -> None:
    (folder / "run.json").write_text("[" * 100_000)


def with_a_name_that_is_no_text(folder: Path) -> None:
    (folder / "run.json").write_text("{")
    folder.rename(os.fsdecode(os.fsencode(folder.parent) + b"/seed\xff"))


DAMAGES = {
    **{
        f"{key} is {value!r}": with_header(**{key: value})
        for key in ("status", "suite", "task", "label")
        for value in ([], 5, "\ud800", "../../x")
    },
    "versions is a list": with_header(versions=["2.x"]),
    "command is half a character": with_header(command="\ud800"),
    "curvature is a list": with_header(config={"curvature": []}),
    "optimizer is a list": with_header(config={"optimizer": []}),
    "optimizer.name is a list": with_header(config={"optimizer": {"name": []}}),
    "lr is beyond all floats": with_header(config={"optimizer": {"name": "sgd", "lr": 10**400}}),
    "deep nesting": with_nesting,
    "a name that is no text": with_a_name_that_is_no_text,
    **{f"{name} is a directory": with_directory(name) for name in ("run.json", "epochs.csv", "refreshes.csv")},
    **{f"{name} is a circle": with_circle(name) for name in ("run.json", "epochs.csv", "refreshes.csv")},
    "a long field": with_row("epochs.csv", "process", "x" * 140_000),
    "a damaged header": with_row("epochs.csv", "train_loss", "trainXloss"),
    "a carriage return": with_row("epochs.csv", ",500.0,", ",500\r.0,"),
    "a damaged refresh": with_row("refreshes.csv", "True", "Trux"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_costs_its_run_and_one_sentence(damage: str, tmp_path: Path) -> None:
    DAMAGES[damage](two_runs(tmp_path))
    logs = load_logs(tmp_path)
    assert logs.runs["label"].tolist() == ["adam"]
    assert len(logs.missing) == 1
    assert logs.missing[0].isprintable()
    assert logs.missing[0].endswith(", left out")


def test_a_budget_beyond_counting_is_not_counted(tmp_path: Path) -> None:
    with_header(config={"epochs": 10**15})(two_runs(tmp_path))
    assert "is not whole (3 of 1000000000000000 epochs), left out" in load_logs(tmp_path).missing[0]


def test_any_number_of_bad_folders_leaves_a_report(tmp_path: Path) -> None:
    for place, damage in enumerate(DAMAGES.values()):
        damage(two_runs(tmp_path / str(place)))
    logs = write_all_but_figures(tmp_path)
    assert logs.runs["label"].tolist() == ["adam"]
    assert len(logs.missing) == 2 * len(DAMAGES) - 1


@pytest.mark.parametrize(
    "content",
    [
        '[{"name": [], "value": 1}]',
        f'[{{"name": "step", "value": 1{"0" * 400}}}]',
        f'[{{"name": "step", "value": 1{"0" * 5000}}}]',
        '[{"name": "step", "value": 1, "note": {"a": []}}]',
        '[{"name": "\\ud800", "value": 1}]',
        "[" * 100_000,
        "5",
    ],
    ids=lambda content: content[:40],
)
def test_a_bad_benchmark_costs_one_sentence(content: str, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / "bench.json").write_text(content)
    (sentence,) = load_logs(tmp_path).missing
    assert sentence.startswith("bench.json cannot be read")


@pytest.mark.parametrize("name", ["bench.json", "theory.csv"])
def test_a_folder_in_the_place_of_a_table_costs_one_sentence(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / name).mkdir()
    assert load_logs(tmp_path).missing == (f"{name} cannot be read (it is not a file), left out",)


@pytest.mark.parametrize("content", ["a,b\n1\n", 'a,b\n"1', "a,a\n1,2\n", f"statement,bound\nx,{'x' * 140_000}\n", ""])
def test_bad_theory_costs_one_sentence(content: str, tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0]))
    (tmp_path / "theory.csv").write_text(content)
    (sentence,) = load_logs(tmp_path).missing
    assert sentence.startswith("theory.csv cannot be read")


@pytest.mark.parametrize("load", [load_bench, load_theory])
@settings(deadline=None, max_examples=100)
@given(content=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_beside_the_runs_is_shown_or_costs_one_sentence(
    load: Callable[[Path, list[str]], DataFrame], content: bytes
) -> None:
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bench.json", "theory.csv"):
            Path(folder, name).write_bytes(content)
        assert isinstance(beside("name", "title", load(Path(folder), missing)).encode(), bytes)
    assert [sentence.isprintable() for sentence in missing] in ([], [True])


KEYS = [(key,) for key in header(Run([1.0]))]
KEYS += [("config", key) for key in ("epochs", "curvature", "optimizer")]
KEYS += [("config", "optimizer", key) for key in Run([1.0]).optimizer]
VALUES = JSON | st.text(alphabet="$_^{}\\-1a", min_size=1) | st.floats(-1e300, 1e300)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=5, max_size=20))
def test_no_value_in_run_json_can_cost_the_report(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        for place, (keys, value) in enumerate(changes):
            path = two_runs(Path(name, str(place))) / "run.json"
            content = json.loads(path.read_text())
            owner = content
            for key in keys[:-1]:
                owner = owner[key]
            owner[keys[-1]] = value
            path.write_text(json.dumps(content))
        assert "adam" in write_all_but_figures(Path(name)).runs["label"].tolist()


def draw(figure: Figure) -> None:
    """Draw a figure to the last letter."""
    FigureCanvasAgg(figure).draw()


@pytest.mark.parametrize("task", ["digits", "-", "$\\frac$", "a" * 255])
def test_figures_are_drawn_whatever_a_task_is_called(task: str, tmp_path: Path) -> None:
    with_header(task=task, label="$\\sqrt$")(two_runs(tmp_path))
    logs = load_logs(tmp_path)
    figures = {
        Path(path).name: make for path, make in figures_of(logs, settings_of(logs)).items() if task in Path(path).parts
    }
    for name in ("train-loss", "eigenvalues"):
        draw(figures[name]())


@pytest.mark.parametrize("losses", [[1e308, -1e308], [5e-324, 1.0], [0.0, 0.0], [-1.0, 2.0]])
def test_figures_and_page_stand_any_loss(losses: list[float], tmp_path: Path) -> None:
    write_run(tmp_path, Run(losses, "a", eigenvalues=losses, task="own-model"))
    write_run(tmp_path, Run(losses, "a", seed=1, seconds=1e299, task="own-model"))
    logs = write_all_but_figures(tmp_path)
    for make in figures_of(logs, settings_of(logs)).values():
        draw(make())


@pytest.mark.parametrize(
    "arguments",
    [["nowhere"], ["a-file"], ["a-circle"], ["empty"], ["logs", "--out", "a-file"], ["logs", "--out", "a-file/x"],
     ["logs", "--out", "a-circle"], ["logs", "--out", "x" * 300], ["x" * 5000], ["logs", "--out"], ["a", "b"],
     ["logs", "--out", "/proc/nowhere"], ["\udcff"]],
    ids=lambda arguments: " ".join(arguments)[:40].encode(errors="replace").decode(),
)  # fmt: skip
def test_odd_arguments_get_a_short_answer(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "logs", Run([3.0, 2.0], task="own-model"))
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-circle").symlink_to("a-circle")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err

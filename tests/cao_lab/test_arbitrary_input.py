"""Whatever a command line or a file holds, the answer is the work done or one line that says why not."""

import contextlib
import io
import json
import os
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cao_lab import cli
from cao_lab.config import ConfigError, Execution, RunConfig, config_from_dict, config_to_dict
from cao_lab.log.header import read_header
from cao_lab.log.records import EpochRecord, LogError, columns
from cao_lab.log.writing import RowFile
from cao_lab.optimizer_config import optimizer_configs
from cao_lab.runs import checkpoint
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.session import Outcome, Session
from cao_lab.spectrum.config import SpectrumConfig
from cao_lab.suites.runner import TrainingRun

ODD = [
    "", " ", "-", ".", "..", "~", "x/y", "-1", "0", "1", "1.5", "nan", "inf", "1e999", "1e308", "1e-320", "None",
    "True", "9" * 25, "99999999999", "a\0b", "a" * 300, "a" * 5000, "☃", "\n", "/dev/null", "/proc/1/mem", "[1]", "{}",
]  # fmt: skip
# No folder but the test's own may be written to, whoever runs it.
texts = st.text(max_size=8).filter(lambda text: not text.startswith(("/", "..")))
values = st.sampled_from(ODD) | texts | st.integers().map(str) | st.floats().map(str)


def flags(*configs: type) -> list[str]:
    names = [field.name for config in configs for field in fields(config)]
    left_out = ("optimizer", "name", "target", "tensorboard")
    return ["--" + name.replace("_", "-") for name in names if name not in left_out]


OF_A_RUN = flags(RunConfig, Execution)
COMMANDS = {
    **{f"train {name}": [*OF_A_RUN, *flags(config)] for name, config in optimizer_configs().items()},
    "suite demo --dry-run": ["--jobs", *flags(Execution)],
    "suite": [],
    "spectrum": flags(SpectrumConfig),
    "data cifar10": ["--data-dir"],
    "bench": ["--out"],
    "theory": ["--logs", "--out"],
}


THEORY = Path(__file__).parents[2] / "logs/theory.csv"


@pytest.fixture(scope="module", autouse=True)
def _nothing_takes_long(tmp_path_factory):
    """Let commands come to the point where work would begin, in a folder that may be littered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("arbitrary"))
        patch.delenv("CAO_DATA", raising=False)
        patch.setattr(Session, "run", lambda self: Outcome("finished", self.log.folder, "done", 0))
        patch.setattr("cao_lab.suites.estimate.measured", lambda *_: None)
        patch.setattr("cao_lab.bench.run.SECTIONS", {})
        patch.setattr("cao_lab.bench.run.write_summary", lambda *_: None)
        patch.setattr("cao_lab.theory.check_theory", lambda *_: pytest.importorskip("pandas").read_csv(THEORY))
        patch.setattr("cao_lab.tasks.download.urlopen", refuse)
        yield


def refuse(*_, **__):
    raise OSError("no network")


def answer(arguments: list[str]) -> tuple[int, str]:
    """Run a command and return its exit code and what it said on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code, said.getvalue()


def assert_answered(arguments: list[str]) -> str:
    code, said = answer(arguments)
    assert code in (0, 2, 3)
    # The command line's parser has a frame of its own around what it says.
    assert said.count("\n") == 1 or not said.startswith("cao:")
    return said


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_command_is_carried_out_or_refused_in_one_line(command, data):
    known = st.tuples(st.sampled_from(COMMANDS[command]), values).map(list) if COMMANDS[command] else st.nothing()
    parts = data.draw(st.lists(known | values.map(lambda value: [value]), max_size=2))
    assert_answered([*command.split(), *(word for part in parts for word in part)])


TOO_MUCH = [
    "train sgd --seed 99999999999999999999999",
    "train sgd --width 99999999999",
    "train sgd --threads 0",
    "train sgd --threads 99999999999",
    "train sgd --checkpoint-minutes nan",
    "train sgd --lr -1",
    "train sgd --lr 1e308",
    "train sgd --weight-decay 1e308",
    "train sgd --max-gradient-norm -1",
    "train sgd --suite .",
    "train sgd --suite ..",
    "train sgd --suite a/b",
    "train sgd --curvature-samples 99999999",
    "train sgd --monitor-curvature 99999999",
    "train lbfgs --batch-size None --history 0",
    "train lbfgs --batch-size None --max-iterations -1",
    "train adahessian --update-every 0",
    "train adahessian --lr -1",
    "train soap --update-every 0",
    "train muon --lr -1",
    "train cao --rank 99999999",
    "spectrum nowhere --threads 0",
    "spectrum nowhere --seed 99999999999999999999999",
    "spectrum nowhere --top 99999999",
    "spectrum nowhere --max-products -1",
    "spectrum nowhere --tolerance nan",
    "bench --out /dev/null/below",
    "theory --out /dev/null/below",
]


@pytest.mark.parametrize("line", TOO_MUCH)
def test_settings_that_cannot_be_meant_are_refused_before_anything_is_done(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = assert_answered(line.split())
    assert said.startswith("cao: ")
    assert not list(tmp_path.glob("logs/*/*"))


USER_FILE = """
import sys, torch
from torch import nn
from torch.nn.functional import mse_loss
from cao_lab.config import RunConfig
from cao_lab.runs.methods.first_order import SGDConfig

def needs(argument): yield []
def raises(): raise KeyError("mine")
def leaves(): sys.exit(3)
def yields_numbers(): yield [1, 2]
def yields_one(): yield RunConfig(SGDConfig())
def returns_a_number(): return 3
def yields_nothing():
    return
    yield

def line(inputs, targets, count=1): return lambda: (nn.Linear(4, 1), mse_loss, [(inputs, targets)] * count)
wrong_width = line(torch.ones(2, 3), torch.ones(2, 1))
wrong_count = line(torch.ones(3, 4), torch.ones(2, 1))
scalars = line(torch.tensor(1.0), torch.tensor(1.0))
no_loss = lambda: (nn.Linear(4, 1), lambda outputs, targets: outputs, [(torch.ones(2, 4), torch.ones(2, 1))])
def endless():
    def batches():
        while True:
            yield torch.ones(0, 4), torch.ones(0, 1)
    return nn.Linear(4, 1), mse_loss, batches()
def broken_batches():
    def batches():
        yield 1 / 0
    return nn.Linear(4, 1), mse_loss, batches()
"""


@pytest.mark.parametrize("name", ["needs", "raises", "leaves", "yields_numbers", "yields_one", "returns_a_number"])
@pytest.mark.parametrize("flag", ["--dry-run", "--jobs=1"])
def test_a_suite_of_the_user_s_that_goes_wrong_is_explained_in_one_line(name, flag):
    Path("suites.py").write_text(USER_FILE)
    assert assert_answered(["suite", f"suites.py:{name}", flag]).startswith("cao: the suite's function failed (")


def test_a_suite_without_runs_is_over_at_once():
    Path("suites.py").write_text(USER_FILE)
    assert answer(["suite", "suites.py:yields_nothing"])[0] == 0
    assert answer(["suite", "suites.py:yields_nothing", "--dry-run"])[0] == 0


@pytest.mark.parametrize(
    "name", ["raises", "leaves", "wrong_width", "wrong_count", "scalars", "no_loss", "endless", "broken_batches"]
)
def test_a_model_of_the_user_s_that_goes_wrong_is_explained_in_one_line(name):
    Path("models.py").write_text(USER_FILE)
    assert assert_answered(["spectrum", f"models.py:{name}"]).startswith("cao: ")


def test_a_file_that_ends_the_program_or_is_called_like_a_module_is_only_a_file():
    Path("leaving.py").write_text("import sys; sys.exit(0)")
    assert "cannot be imported (SystemExit" in assert_answered(["suite", "leaving.py:SUITE"])
    Path("json.py").write_text("SUITE = []")
    assert answer(["suite", "json.py:SUITE"])[0] == 0
    assert json.loads("1") == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WHOLE = config_to_dict(RunConfig(CAOConfig()))


@settings(deadline=None)
@given(name=st.sampled_from([*WHOLE, "nonsense"]), value=json_values, within_optimizer=st.booleans())
def test_a_config_is_read_or_refused(name, value, within_optimizer):
    data = {**WHOLE, "optimizer": {**WHOLE["optimizer"], name: value}} if within_optimizer else {**WHOLE, name: value}
    with contextlib.suppress(ConfigError):
        assert isinstance(config_from_dict(data), RunConfig)


@settings(deadline=None)
@given(content=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_header_is_read_or_refused(content):
    Path("run.json").write_bytes(content)
    with contextlib.suppress(LogError):
        assert read_header(Path())["status"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"status": ' + "9" * 10_000 + "}", '{"status": 3}', "{}"])
def test_a_header_that_no_run_wrote_is_refused_by_every_command_in_one_line(text):
    config = RunConfig(SGDConfig(), suite="odd")
    folder = Path("logs", config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(text)
    for arguments in (["train", "sgd", "--suite", "odd"], ["spectrum", str(folder)]):
        assert "move" in assert_answered(arguments)
    assert TrainingRun(config).outcome(Execution().logs) is None
    (folder / "run.json").unlink()
    folder.rmdir()
    os.removedirs(folder.parent)


@settings(deadline=None)
@given(content=st.binary(max_size=80), rows=st.integers(0, 3))
def test_rows_are_cut_back_or_the_file_is_refused_untouched(content, rows):
    file = RowFile(Path("epochs.csv"), EpochRecord)
    header = ",".join(columns(file.record)).encode() + b"\n"
    file.path.write_bytes(header + content)
    try:
        file.cut_back(rows)
    except LogError:
        assert file.path.read_bytes() == header + content
    else:
        assert file.path.read_bytes().count(b"\n") == (rows + 1 if rows else 0)


@settings(deadline=None)
@given(content=st.binary(max_size=80))
def test_a_checkpoint_of_arbitrary_bytes_is_passed_over(content):
    Path("checkpoint.pt").write_bytes(content)
    said = []
    assert checkpoint.load(Path(), said.append, restore=lambda saved: saved) is None
    assert len(said) == 1
    assert "\n" not in said[0]

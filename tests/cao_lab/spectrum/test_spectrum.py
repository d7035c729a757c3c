"""The command `cao spectrum`: what it measures, what it writes, what it leaves alone, and what it refuses."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from cao_lab.config import ConfigError, Execution, RunConfig
from cao_lab.runs import checkpoint
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.session import run
from cao_lab.spectrum.config import SpectrumConfig, SpectrumError
from cao_lab.spectrum.measure import measure, measure_spectrum
from cao_lab.spectrum.target import Target, load_target, split

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _same_import_path(monkeypatch):
    """A user's file brings its folder along; the next test must not find it there."""
    monkeypatch.setattr(sys, "path", list(sys.path))


USER_FILE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def regression():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(50, 4, generator=generator).double(), torch.randn(50, 1, generator=generator).double()
    model = nn.Linear(4, 1, bias=False).double()
    return model, mse_loss, list(zip(inputs.split(16), targets.split(16)))

def two_things():
    return nn.Linear(4, 1), mse_loss

def no_model():
    return "model", mse_loss, []

def no_samples():
    return nn.Linear(4, 1), mse_loss, []

def dictionaries():
    return nn.Linear(4, 1), mse_loss, [{"inputs": torch.ones(2, 4)}]

def exploded():
    return nn.Linear(4, 1), mse_loss, [(torch.full((2, 4), torch.inf), torch.ones(2, 1))]

number = 3
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    config = RunConfig(SGDConfig(), width=8, epochs=1, l2=0.01)
    return run(config, Execution(logs=tmp_path_factory.mktemp("logs"))).folder


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(USER_FILE)
    return path


def batch_norm_target(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 6, generator=generator, dtype=dtype)
    labels = torch.randint(3, (48,), generator=generator)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3)).to(dtype)
    return Target(model, cross_entropy, split((inputs, labels), 20), name="small")


def quick(target, **changes):
    config = SpectrumConfig(str(target), top=2, probes=2, iterations=8, trace_products=9)
    return replace(config, **changes)


def test_a_run_gives_table_json_and_figures(run_folder, tmp_path):
    printed = measure_spectrum(quick(run_folder, by_layer=True, out=tmp_path))
    content = json.loads((tmp_path / "spectrum.json").read_text())
    assert "trace" in printed
    assert content["samples"] == 512
    assert content["parts"] == 4
    assert len(content["largest"]) == len(content["smallest"]) == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"density.png", "layers.png", "eigenvalues.csv", "layers.md"}


def test_the_spectrum_of_a_run_includes_its_l2_term(run_folder):
    config = quick(run_folder)
    target = load_target(config)
    with_l2, without = measure(target, config), measure(replace(target, l2=0.0), config)
    assert with_l2.largest[0].value == pytest.approx(without.largest[0].value + 0.01, rel=1e-3)


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_the_spectrum_of_linear_regression_is_its_closed_form(user_file, curvature):
    config = quick(f"{user_file}:regression", top=4, curvature=curvature, trace_products=12)
    target = load_target(config)
    inputs = torch.cat([inputs for inputs, _ in target.parts])
    # Parts of 16, 16, 16 and 2 samples: only weights by size give 2/N XᵀX.
    expected = torch.linalg.eigvalsh(2 / 50 * inputs.T @ inputs)
    spectrum = measure(target, config)
    assert [pair.value for pair in spectrum.largest] == pytest.approx(expected.flip(0).tolist())
    assert [pair.value for pair in spectrum.smallest] == pytest.approx(expected.tolist())
    assert spectrum.trace.value == pytest.approx(float(expected.sum()))
    assert spectrum.loss == pytest.approx(
        float(mse_loss(target.model(inputs), torch.cat([t for _, t in target.parts])))
    )


@pytest.mark.parametrize("mode", [None, "train", "eval"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_the_model_comes_out_as_it_went_in(mode, curvature):
    target = batch_norm_target()
    target.model[3].eval()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    modes = [module.training for module in target.model.modules()]
    stream = torch.get_rng_state()
    spectrum = measure(target, quick("small", mode=mode, curvature=curvature))
    assert spectrum.mode == (mode or "train")
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())
    assert [module.training for module in target.model.modules()] == modes
    assert all(p.grad is None for p in target.model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)


def test_shares_of_layers_add_up_to_one():
    spectrum = measure(batch_norm_target(), quick("small", by_layer=True))
    assert [layer.name for layer in spectrum.layers][:2] == ["0.weight", "0.bias"]
    for shares in zip(*[layer.shares for layer in spectrum.layers], strict=True):
        assert sum(shares) == pytest.approx(1, abs=1e-5)
    # Batch norm subtracts the mean, so the bias before it has no say.
    assert max(spectrum.layers[1].shares) < 1e-8


def test_samples_are_cut_where_asked(user_file):
    target = load_target(quick(f"{user_file}:regression", samples=20, part=6))
    assert [len(targets) for _, targets in target.parts] == [6, 5, 5, 4]


def test_a_run_without_its_checkpoint_says_how_to_make_one(run_folder, tmp_path):
    (tmp_path / "run.json").write_text((run_folder / "run.json").read_text())
    with pytest.raises(SpectrumError, match=r"no checkpoint.pt that is whole.*: cao train sgd .*--logs out/logs"):
        load_target(quick(tmp_path))


def test_a_damaged_checkpoint_is_not_measured(run_folder, tmp_path, capsys):
    (tmp_path / "run.json").write_text((run_folder / "run.json").read_text())
    checkpoint.current(tmp_path).write_bytes(b"not a checkpoint")
    with pytest.raises(SpectrumError, match=r"has no checkpoint.pt"):
        load_target(quick(tmp_path))
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "nowhere holds no run.json; name the folder of a run"),
        ("{file}", "names no function; write .*models.py:function"),
        ("{file}:", "names no function"),
        ("{file}:missing", "has no function missing"),
        ("{file}:number", "has no function number"),
        ("{file}:two_things", r"returned 2 values; it must return \(model, loss function, batches\)"),
        ("{file}:no_model", "returned str among its three values"),
        ("{file}:no_samples", "returned no samples"),
        ("{file}:dictionaries", "must be a pair of tensors .*, got dict"),
    ],
)
def test_a_wrong_target_is_explained_in_one_line(user_file, target, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(quick(target.format(file=user_file)))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_imported_is_explained(tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported \(ModuleNotFoundError"):
        load_target(quick(f"{tmp_path / 'broken.py'}:function"))
    with pytest.raises(ConfigError, match=r"missing.py is not a file"):
        load_target(quick("missing.py:function"))


def test_a_non_finite_loss_is_refused(user_file):
    config = quick(f"{user_file}:exploded")
    with pytest.raises(SpectrumError, match="the loss is nan"):
        measure(load_target(config), config)


@pytest.mark.parametrize(("field", "value"), [("top", 0), ("samples", 0), ("part", 0), ("tolerance", 0.0)])
def test_settings_that_cannot_be_meant_are_refused(field, value):
    with pytest.raises(SpectrumError, match=f"{field} must be"):
        quick("anywhere", **{field: value})


def test_the_sharpness_example_draws_its_picture(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "sharpness.py"))["main"](epochs=3, out=tmp_path / "s.png")
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()[:3]] == ["SGD", "Adam", "CAO"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")

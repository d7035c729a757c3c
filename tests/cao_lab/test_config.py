import json
import math

import pytest
import tyro

from cao_lab import cli
from cao_lab.config import (
    ConfigError,
    RunConfig,
    command_line,
    config_from_dict,
    config_to_dict,
    differences,
)
from cao_lab.facts import DATASETS, MODELS
from cao_lab.optimizer_config import optimizer_configs
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.runs.methods.lbfgs import LBFGSConfig


def parsed(line: str) -> RunConfig:
    """Parse a command line as `cao` does, up to the point where the run would start."""
    program, _, *arguments = line.split()
    assert program == "cao"
    return tyro.cli(RunConfig, args=arguments, config=cli.SHORT_NAMES)


@pytest.mark.parametrize("name", DATASETS)
def test_the_command_line_takes_every_dataset(name):
    assert parsed(f"cao train sgd --dataset {name}").dataset == name


@pytest.mark.parametrize("name", MODELS)
def test_the_command_line_takes_every_model(name):
    assert parsed(f"cao train sgd --model {name}").model == name


@pytest.mark.parametrize("option", ["--dataset", "--model"])
def test_the_command_line_lists_the_choices_where_a_name_is_unknown(option, capsys):
    with pytest.raises(SystemExit):
        parsed(f"cao train sgd {option} nonsense")
    assert "'cifar100', 'digits'" in capsys.readouterr().err.replace("\n", " ") or option == "--model"


@pytest.mark.parametrize("name", optimizer_configs())
def test_config_survives_json(name):
    config = RunConfig(optimizer_configs()[name](lr=0.3), batch_size=None, seed=3)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_a_field_that_an_old_log_lacks_takes_its_default():
    data = config_to_dict(RunConfig(SGDConfig()))
    del data["curvature_part"], data["optimizer"]["nesterov"]
    assert config_from_dict(data) == RunConfig(SGDConfig())


@pytest.mark.parametrize("data", [{}, {"optimizer": {"name": "magic"}}, {"optimizer": {"name": "sgd", "x": 1}}])
def test_foreign_json_is_refused(data):
    with pytest.raises(ConfigError, match="not the config of a run"):
        config_from_dict(data)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(SGDConfig()),
        RunConfig(SGDConfig(lr=0.5, nesterov=True, max_gradient_norm=None), dataset="cifar10", model="resnet34"),
        RunConfig(CAOConfig(rank=0, scaling="unit", damping=0.5, warm_start=True), batch_size=None, l2=1e-3),
        RunConfig(LBFGSConfig(line_search="none"), batch_size=None, schedule="cosine", suite="mine", seed=7),
    ],
)
def test_recorded_command_line_parses_to_the_same_config(config):
    assert parsed(command_line(config)) == config


def test_label_names_the_optimizer_and_what_is_not_default():
    assert RunConfig(SGDConfig()).label == "sgd"
    assert RunConfig(CAOConfig()).label == "cao-rank1"
    assert RunConfig(CAOConfig(rank=0, scaling="unit")).label == "cao-rank0-scaling=unit"
    assert RunConfig(SGDConfig(lr=0.1, momentum=0), schedule="step").label == "sgd-lr0.1-momentum0-schedule=step"


def test_task_names_the_problem():
    config = RunConfig(AdamConfig(), "cifar100", "resnet18", width=16, train_samples=5000)
    assert config.task == "cifar100-resnet18w16-n5000"
    assert RunConfig(AdamConfig(), "cifar10", "resnet18").task == "cifar10-resnet18"
    assert RunConfig(AdamConfig(), batch_size=None, l2=0.01).task == "digits-mlp-full-l2=0.01"


def test_folder_is_suite_task_label_seed():
    assert str(RunConfig(AdamConfig(), seed=2, suite="demo").folder) == "demo/digits-mlp/adam/seed2"


def test_differences_name_each_field_once():
    lines = differences(RunConfig(SGDConfig(lr=0.1)), RunConfig(SGDConfig(lr=0.2), epochs=3))
    assert lines == ["optimizer.lr: 0.1 in the log, 0.2 now", "epochs: 20 in the log, 3 now"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be at least 1, got 0"),
        ("batch_size", -1, "batch_size must be at least 1"),
        ("l2", -0.1, "l2 must not be negative"),
        ("l2", math.inf, "l2 must be finite and at most"),
        ("suite", "../elsewhere", "suite must be a folder name"),
    ],
)
def test_impossible_runs_are_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**{"optimizer": SGDConfig(), field: value})


def test_lbfgs_on_mini_batches_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="--batch-size None"):
        RunConfig(LBFGSConfig())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SGDConfig, {"lr": math.nan}, "lr must be finite, got nan"),
        (SGDConfig, {"weight_decay": 1e38}, "weight_decay must be at most"),
        (AdamConfig, {"lr": -1.0}, "lr must not be negative"),
        (AdamConfig, {"max_gradient_norm": 0.0}, "max_gradient_norm must be positive, or None"),
        (LBFGSConfig, {"history": 0}, "history must be at least 1"),
        (CAOConfig, {"damping": math.inf}, "damping must be finite"),
    ],
)
def test_settings_of_an_optimizer_that_cannot_be_meant_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)

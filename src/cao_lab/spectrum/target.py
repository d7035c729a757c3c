"""What a spectrum is taken of: the model of a run in the logs, or one that a function of the user's returns."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cao_lab.config import command_line, config_from_dict
from cao_lab.log.header import read_header
from cao_lab.runs import checkpoint
from cao_lab.runs.curvature import SampledLoss
from cao_lab.runs.loss import TrainingTask
from cao_lab.spectrum.config import Mode, SpectrumConfig, SpectrumError
from cao_lab.tasks.data import Batch, curvature_batch, load
from cao_lab.tasks.problems import dataset_for
from cao_lab.user_code import explained, user_function

RETURNS = "it must return (model, loss function, batches)"


@dataclass(frozen=True)
class Target(SampledLoss):
    """A loss over fixed samples that has a name."""

    name: str = ""


def load_target(config: SpectrumConfig) -> Target:
    """Load what the command line names."""
    is_function = ".py:" in config.target or config.target.endswith(".py")
    return target_of_function(config) if is_function else target_of_run(config)


def target_of_run(config: SpectrumConfig) -> Target:
    """Load a run's model from its checkpoint, and draw training samples without augmentation."""
    folder = Path(config.target)
    header = read_header(folder)
    if header is None:
        raise SpectrumError(
            f"{folder} holds no run.json; name the folder of a run, such as logs/runs/digits-mlp/sgd/seed0, "
            "or path.py:function"
        )
    run = config_from_dict(header.get("config", {}))
    dataset = dataset_for(run.model, load(run.dataset, config.data_dir, run.train_samples))
    task = TrainingTask(run, dataset, torch.device("cpu"))
    if checkpoint.load(folder, warn, lambda saved: task.model.load_state_dict(saved["training"]["model"])) is None:
        raise SpectrumError(
            f"{folder} has no checkpoint.pt that is whole, and git keeps none; "
            f"make one: {command_line(run)} --logs out/logs"
        )
    samples = min(config.samples, len(dataset.train_inputs))
    batch = task.cast(curvature_batch(dataset, samples, seed=config.seed, step=0))
    parts = split(batch, config.part or run.batch_size or run.curvature_part)
    return Target(task.model, task.loss_of_outputs, parts, run.l2, name=str(run.folder))


def warn(message: str) -> None:
    """Tell what the user should know but need not act on."""
    sys.stderr.write(f"cao: {message}\n")


def target_of_function(config: SpectrumConfig) -> Target:
    """Call the user's function, and keep as many of its samples as are asked for."""
    path, _, name = config.target.rpartition(":")
    function = user_function(config.target, f"names no function; write {config.target.split(':')[0]}:function", RETURNS)
    with explained(f"{config.target} failed"):
        result = function()
    model, loss_of_outputs, batches = checked_result(result, config.target)
    with explained(f"the batches of {config.target} failed"):
        parts = first_samples(batches, config.samples, config.target)
    if config.part is not None:
        parts = [piece for part in parts for piece in split(part, config.part)]
    return Target(model, loss_of_outputs, parts, name=f"{Path(path).stem}-{name}")


def checked_result(result: Any, name: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Iterable[Any]]:
    """Return what the user's function returned, if it is of use."""
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise SpectrumError(f"{name} returned {got}; {RETURNS}")
    model, loss_of_outputs, batches = result
    for value, is_right in (
        (model, isinstance(model, nn.Module)),
        (loss_of_outputs, callable(loss_of_outputs)),
        (batches, isinstance(batches, Iterable)),
    ):
        if not is_right:
            raise SpectrumError(f"{name} returned {type(value).__name__} among its three values; {RETURNS}")
    if not any(p.requires_grad for p in model.parameters()):
        raise SpectrumError(f"{name} returned a model without trainable parameters; there is no curvature to see")
    return model, loss_of_outputs, batches


def first_samples(batches: Iterable[Any], samples: int, name: str) -> list[Batch]:
    """Keep the first samples of the batches, as they come; the last batch is cut."""
    parts: list[Batch] = []
    missing = samples
    for batch in batches:
        if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)):
            raise SpectrumError(f"{name}: a batch must be a pair of tensors (inputs, targets), got {kind(batch)}")
        inputs, targets = batch
        if not (inputs.ndim and targets.ndim and 0 < len(inputs) == len(targets)):
            shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
            raise SpectrumError(f"{name}: inputs and targets must have as many samples, and some, got {shapes}")
        parts.append((inputs[:missing], targets[:missing]))
        missing -= len(targets)
        if missing <= 0:
            break
    if not parts:
        raise SpectrumError(f"{name} returned no samples; batches must yield (inputs, targets)")
    return parts


def kind(batch: Any) -> str:
    """Name what was got in place of a pair of tensors."""
    if isinstance(batch, list | tuple):
        return f"({', '.join(type(value).__name__ for value in batch)})"
    return type(batch).__name__


def split(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into parts of nearly equal size, none of them larger than `size`."""
    inputs, targets = batch
    count = -(-len(targets) // size)
    return list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))


@contextmanager
def in_mode(model: nn.Module, mode: Mode | None) -> Iterator[str]:
    """Put a model into a mode, tell which it is in, and put each of its modules back afterwards."""
    before = {module: module.training for module in model.modules()}
    try:
        if mode is not None:
            model.train(mode == "train")
        yield "train" if model.training else "eval"
    finally:
        for module, was_training in before.items():
            module.training = was_training

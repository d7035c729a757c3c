import logging
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import flat_params, loss_of, smooth_network
from torch import Tensor
from torch.utils.data import DataLoader

from cao import CAO


@pytest.fixture(autouse=True)
def _quiet_lightning() -> Iterator[None]:
    """Drop Lightning's remarks about workers, devices and loggers, none of which are ours."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class InTrainingStep(lightning.LightningModule):
    """Refreshes where the loss is made, through the optimizer that Lightning hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.network = smooth_network()

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> Tensor:
        loss = loss_of(self.network, data)
        self.optimizers().refresh_if_due(loss)
        return loss

    def configure_optimizers(self) -> CAO:
        return CAO(self.network.parameters(), 0.1, **SETTINGS)


class InHook(InTrainingStep):
    """Refreshes in the hook that stands before the backward pass."""

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> Tensor:
        return loss_of(self.network, data)

    def on_before_backward(self, loss: Tensor) -> None:
        self.optimizers().refresh_if_due(loss)


class ByHand(InTrainingStep):
    """Lightning's manual optimization: the documented loop, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> None:
        optimizer = self.optimizers()
        loss = loss_of(self.network, data)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        self.manual_backward(loss)
        optimizer.step()


def lightning_trainer(directory, **settings) -> lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", default_root_dir=directory, **quiet, **{"max_epochs": 1, **settings})


@pytest.mark.parametrize("build", [InTrainingStep, InHook, ByHand])
def test_lightning_takes_the_steps_of_a_plain_loop(build, tmp_path):
    module = build()
    trainer = lightning_trainer(tmp_path)
    trainer.fit(module, DataLoader(BATCHES, batch_size=None))
    assert_as_in_the_plain_loop(module.network, trainer.optimizers[0])


def test_lightning_resumes_from_its_checkpoint(tmp_path):
    module = InTrainingStep()
    first = lightning_trainer(tmp_path, max_steps=5)
    first.fit(module, DataLoader(BATCHES[:5], batch_size=None))
    first.save_checkpoint(tmp_path / "five.ckpt")
    second = lightning_trainer(tmp_path, max_epochs=2)
    second.fit(module, DataLoader(BATCHES[5:], batch_size=None), ckpt_path=tmp_path / "five.ckpt")
    assert_as_in_the_plain_loop(module.network, second.optimizers[0])


def test_fabric_takes_the_steps_of_a_plain_loop():
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    network = smooth_network()
    model, optimizer = fabric.setup(network, CAO(network.parameters(), 0.1, **SETTINGS))
    for data in BATCHES:
        loss = loss_of(model, data)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        fabric.backward(loss)
        optimizer.step()
    assert_as_in_the_plain_loop(network, optimizer.optimizer)


def test_fabric_lets_a_model_in_mixed_precision_refresh_and_keeps_its_own_rule():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    network = smooth_network(torch.float32)
    model, optimizer = fabric.setup(network, CAO(network.parameters(), 0.1, **SETTINGS))
    inputs, labels = BATCHES[0]
    data = inputs.float(), labels
    loss = loss_of(model, data)
    assert optimizer.refresh_if_due(loss)
    fabric.backward(loss)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loss_of(model, data).backward()


class ScaledInHook(InHook):
    """Refreshes in the hook, which is given the loss after Lightning has divided and scaled it."""

    def on_before_backward(self, loss: Tensor) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = (scaler.get_scale() if scaler else 1.0) / self.trainer.accumulate_grad_batches
        self.optimizers().refresh_if_due(loss, scale=scale)


PARTS = [part for data in BATCHES for part in zip(*(tensor.split(4) for tensor in data), strict=True)]


def accumulating_loop() -> tuple[Tensor, CAO]:
    """Return where a plain loop leads that takes each batch in two halves, and refreshes with the first."""
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    for number, part in enumerate(PARTS):
        loss = loss_of(model, part)
        optimizer.refresh_if_due(loss)
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return flat_params(model), optimizer


def scaled_precision() -> MixedPrecision:
    """Return Lightning's fp16 plugin on a CPU: no autocast, so that only the scale of the loss is at stake."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.forward_context = nullcontext
    return plugin


@pytest.mark.parametrize("plugins", [list, lambda: [scaled_precision()]], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    "build",
    [pytest.param(ScaledInHook), pytest.param(InTrainingStep)],
    ids=["in the hook", "in the training step"],
)
def test_accumulation_and_scaling_by_lightning_leave_the_curvature_alone(build, plugins, tmp_path):
    module = build()
    trainer = lightning_trainer(tmp_path, accumulate_grad_batches=2, plugins=plugins())
    trainer.fit(module, DataLoader(PARTS, batch_size=None))
    params, reference = accumulating_loop()
    found = trainer.optimizers[0]
    assert found.sketch.values == pytest.approx(reference.sketch.values, rel=1e-9)
    assert found.counters == reference.counters
    torch.testing.assert_close(flat_params(module.network), params, rtol=1e-9, atol=1e-11)

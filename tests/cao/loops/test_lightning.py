import logging
import warnings
from collections.abc import Iterator

import lightning
import pytest
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import loss_of, smooth_network
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

import logging
import runpy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import lightning
import lightning_ranks
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning_ranks import HalfBatches
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import (
    Attention,
    batch,
    dense_hessian,
    flat_params,
    loss_of,
    noisy_network,
    seeded,
    smooth_network,
    top_sketch,
    train,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from cao import CAO
from cao.integrations.lightning import CAOCallback

EXACT = {"rank": 2, "refresh_every": 3, "damping": 0.5, "power_iterations": 20, "eigensolver": "lanczos"}


@pytest.fixture(autouse=True)
def _quiet_lightning() -> Iterator[None]:
    """Drop Lightning's remarks about workers, devices and loggers, none of which are ours."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Module(lightning.LightningModule):
    """What a user writes who leaves the refreshes to the callback."""

    def __init__(self, network: nn.Module | None = None, settings: dict | None = None) -> None:
        super().__init__()
        self.network, self.settings = network or smooth_network(), settings or SETTINGS
        self.has_fused_attention: list[bool] = []

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> Tensor:
        self.has_fused_attention.append(torch.backends.cuda.flash_sdp_enabled())
        return loss_of(self.network, data)

    def configure_optimizers(self) -> CAO:
        return CAO(self.network.parameters(), 0.1, **self.settings)


def fitted(module: lightning.LightningModule, batches: list, folder: Path, **settings) -> lightning.Trainer:
    """Train for an epoch with the callback."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": 1, "accelerator": "cpu", "callbacks": [CAOCallback()], **quiet, **settings}
    path = options.pop("ckpt_path", None)
    trainer = lightning.Trainer(default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
    return trainer


def test_the_callback_takes_the_steps_of_a_plain_loop(tmp_path):
    module = Module()
    trainer = fitted(module, BATCHES, tmp_path)
    assert_as_in_the_plain_loop(module.network, trainer.optimizers[0])


def scaled_precision() -> MixedPrecision:
    """Return Lightning's fp16 plugin on a CPU: no autocast, so that only the scale of the loss is at stake."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.forward_context = nullcontext
    return plugin


@pytest.mark.parametrize("is_scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_curvature_is_that_of_the_undivided_loss(parts, is_scaled, tmp_path):
    module = Module(settings=EXACT)
    expected = top_sketch(dense_hessian(module.network, BATCHES[0]), 2)[0]
    plugins = [scaled_precision()] if is_scaled else []
    trainer = fitted(module, BATCHES[:parts], tmp_path, accumulate_grad_batches=parts, plugins=plugins)
    assert trainer.optimizers[0].counters[:2] == (1, 1)
    assert trainer.optimizers[0].sketch.values == pytest.approx(expected.tolist(), rel=1e-6)
    assert trainer.callback_metrics["cao/sharpness"] == pytest.approx(abs(float(expected[0])), rel=1e-6)


def test_bfloat16_finds_the_curvature_to_its_own_precision(tmp_path):
    module = Module(smooth_network(torch.float32), EXACT)
    data = batch(dtype=torch.float32)
    expected = float(top_sketch(dense_hessian(module.network, data), 1)[0])
    trainer = fitted(module, [data], tmp_path, precision="bf16-mixed")
    assert trainer.optimizers[0].sketch.values[0] == pytest.approx(expected, rel=0.02)


def test_clipping_by_lightning_takes_the_steps_of_a_plain_loop_that_clips(tmp_path):
    module, reference = Module(), smooth_network()
    fitted(module, BATCHES, tmp_path, gradient_clip_val=0.05)
    optimizer = CAO(reference.parameters(), 0.1, **SETTINGS)
    for data in BATCHES:
        loss = loss_of(reference, data)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
    torch.testing.assert_close(flat_params(module.network), flat_params(reference), rtol=1e-9, atol=1e-11)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    module = Module()
    fitted(module, BATCHES[:5], tmp_path, max_steps=5).save_checkpoint(tmp_path / "five.ckpt")
    trainer = fitted(module, BATCHES[5:], tmp_path, max_epochs=2, ckpt_path=tmp_path / "five.ckpt")
    assert_as_in_the_plain_loop(module.network, trainer.optimizers[0])


def test_two_processes_take_the_steps_of_one_on_the_joined_batch(tmp_path):
    strategy = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    fitted(HalfBatches(tmp_path), lightning_ranks.BATCHES, tmp_path, **strategy)
    ends = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **lightning_ranks.SETTINGS)
    train(model, optimizer, lightning_ranks.BATCHES)
    torch.testing.assert_close(ends[0][0], flat_params(model), rtol=1e-8, atol=1e-10)
    assert ends[0][1] == pytest.approx(optimizer.sketch.values, rel=1e-7)
    assert ends[0][2] == tuple(optimizer.counters)


def again(function, hidden):
    return checkpoint(function, hidden, use_reentrant=False)


@pytest.mark.parametrize("form", [None, again], ids=["plain", "checkpointed"])
def test_attention_is_unfused_for_the_batches_with_a_refresh_and_for_no_others(form, tmp_path):
    module = Module(seeded(lambda: Attention(checkpoint=form)), EXACT)
    batches = [batch(4, 5, 3, seed=seed) for seed in range(5)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = top_sketch(dense_hessian(seeded(Attention), batches[0]), 2)[0]
    fitted(module, batches[:1], tmp_path)
    first = module.trainer.optimizers[0].sketch.values
    assert first == pytest.approx(expected.tolist(), rel=1e-6)
    module.has_fused_attention.clear()
    fitted(module, batches, tmp_path)
    assert module.has_fused_attention == [False, True, True, False, True]
    assert torch.backends.cuda.flash_sdp_enabled()


def test_batch_norm_and_dropout_do_as_in_a_plain_loop(tmp_path):
    module, reference = Module(noisy_network()), noisy_network()
    torch.manual_seed(1)
    fitted(module, BATCHES, tmp_path)
    torch.manual_seed(1)
    train(reference, CAO(reference.parameters(), 0.1, **SETTINGS), BATCHES)
    # Lightning may draw from the stream at the start, but the statistics of the first layer see no dropout mask before
    # the parameters have moved.
    torch.testing.assert_close(list(module.network.buffers())[-1], list(reference.buffers())[-1])


def test_the_optimizer_is_left_as_it_was_when_training_fails(tmp_path):
    class Failing(Module):
        def training_step(self, data: tuple[Tensor, Tensor], index: int) -> Tensor:
            raise ZeroDivisionError

    module = Failing()
    with pytest.raises(ZeroDivisionError):
        fitted(module, BATCHES, tmp_path)
    assert torch.backends.cuda.flash_sdp_enabled()


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithSGD(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), 0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (ByHand, r"leave it out, and call self\.optimizers"),
        (WithSGD, "needs a CAO .* got SGD"),
    ],
)
def test_what_the_callback_cannot_serve_is_refused_with_the_way_out(build, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fitted(build(), BATCHES, tmp_path)


class Searching(Module):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> CAO:
        return CAO(self.network.parameters(), self.lr, **self.settings)


def test_a_search_for_the_learning_rate_refreshes_too(tmp_path):
    module, quiet = Searching(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callback = CAOCallback()
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet
    )
    data = DataLoader(BATCHES * 4, batch_size=None)
    found = Tuner(trainer).lr_find(module, data, num_training=20)
    assert len(found.results["lr"]) == 20
    assert module.lr == found.suggestion()
    assert trainer.callbacks.count(callback) == 1
    assert "on_train_start" not in vars(module)
    trainer.fit(module, data)
    assert trainer.optimizers[0].counters.refreshes > 0


def test_without_the_callback_the_error_names_it(tmp_path):
    with pytest.raises(RuntimeError, match="under Lightning CAOCallback does so among"):
        fitted(Module(), BATCHES, tmp_path, callbacks=[])


def test_the_example_trains_and_logs_the_sharpness(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples/lightning_callback.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(printed.split("sharpness ")[1].split()[0]) > 0

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch
from small_models import batch, loss_of, seeded, smooth_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from cao import Hessian, Sharpness, top_eigenpairs
from cao.integrations.lightning import SharpnessCallback as LightningCallback
from cao.integrations.transformers import SharpnessCallback as TrainerCallback

EXACT = {"budget": None, "tolerance": 1e-6, "max_products": 100}
BATCHES = [batch(16, seed=seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Drop remarks about workers, devices and loggers, none of which are ours."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning|transformers|accelerate|torch\.utils\.data")
        yield


class Module(lightning.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.network, self.optimizers_wanted = smooth_network(), optimizers

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> Tensor:
        return loss_of(self.network, data)

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(self.network.parameters(), 0.1) for _ in range(self.optimizers_wanted)]


def fitted(callback: LightningCallback, folder: Path, module: Module | None = None, **settings) -> lightning.Trainer:
    batches = settings.pop("batches", BATCHES)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    path = settings.pop("ckpt_path", None)
    options = {"max_epochs": 1, "accelerator": "cpu", "callbacks": [callback], **quiet, **settings}
    trainer = lightning.Trainer(default_root_dir=folder, **options)
    trainer.fit(module or Module(), DataLoader(batches, batch_size=None), ckpt_path=path)
    return trainer


def plain_readings(parts: int = 1) -> list[float]:
    """Return the sharpness of the first part of each batch in a plain loop."""
    model = smooth_network()
    optimizer = SGD(model.parameters(), 0.1)
    watch = Sharpness(optimizer, **EXACT)
    for start in range(0, len(BATCHES), parts):
        optimizer.zero_grad()
        for data in BATCHES[start : start + parts]:
            loss = loss_of(model, data)
            watch(loss)
            (loss / parts).backward()
        optimizer.step()
    return [reading.sharpness for reading in watch.readings]


@pytest.mark.parametrize("parts", [1, 3])
def test_the_lightning_callback_sees_what_a_plain_loop_sees(parts, tmp_path):
    callback = LightningCallback(**EXACT)
    trainer = fitted(callback, tmp_path, accumulate_grad_batches=parts)
    assert [r.sharpness for r in callback.watch.readings] == pytest.approx(plain_readings(parts), rel=1e-4)
    assert float(trainer.callback_metrics["watch/ratio"]) == pytest.approx(callback.watch.readings[-1].ratio)


def test_the_lightning_callback_goes_on_from_a_checkpoint(tmp_path):
    first = fitted(LightningCallback(**EXACT), tmp_path, batches=BATCHES[:3])
    first.save_checkpoint(tmp_path / "three.ckpt")
    callback = LightningCallback(**EXACT)
    fitted(callback, tmp_path, batches=BATCHES[3:], max_epochs=2, ckpt_path=tmp_path / "three.ckpt")
    assert [reading.step for reading in callback.watch.readings] == [0, 1, 2, 3, 4, 5]
    assert [reading.sharpness for reading in callback.watch.readings] == pytest.approx(plain_readings(), rel=1e-4)


def test_the_lightning_callback_refuses_several_optimizers(tmp_path):
    module = Module(optimizers=2)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="SharpnessCallback watches one optimizer"):
        fitted(LightningCallback(), tmp_path, module)


def tiny_gpt(attention: str) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2}
    masks = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **masks, attn_implementation=attention, bos_token_id=0, eos_token_id=0)
    return seeded(lambda: GPT2LMHeadModel(config), torch.float32)


def sentences(*lengths: int) -> list[dict[str, Tensor]]:
    """Return sentences of which so many words are to be predicted."""
    words = torch.randint(7, (len(lengths), 6), generator=torch.Generator().manual_seed(0))
    labels = [each.clone().index_fill(0, torch.tensor([0, *range(length, 6)]), -100)
              for each, length in zip(words, lengths, strict=True)]  # fmt: skip
    return [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]


def trained(callback: TrainerCallback, folder: Path, **settings) -> Trainer:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.0}
    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    model = tiny_gpt("sdpa")
    trainer = Trainer(
        model,
        TrainingArguments(folder, **{**quiet, **usual, **settings}),
        train_dataset=sentences(4, 4, 2, 2),
        data_collator=lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]},
        optimizers=(SGD(model.parameters(), 1e-30), None),
        callbacks=[callback],
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    return trainer


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_trainers_callback_sees_the_undivided_loss(parts, is_checkpointed, tmp_path):
    callback = TrainerCallback(**EXACT)
    trained(
        callback,
        tmp_path,
        gradient_accumulation_steps=parts,
        gradient_checkpointing=is_checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    model, items = tiny_gpt("eager"), sentences(4, 4)
    words, labels = (torch.stack([item[name] for item in items]) for name in ("input_ids", "labels"))
    loss = cross_entropy(model(words).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected = float(top_eigenpairs(Hessian(loss, model.parameters()), tolerance=1e-4).values)
    assert callback.watch.readings[0].sharpness == pytest.approx(expected, rel=1e-3)
    assert len(callback.watch.readings) == 2 // parts


def test_the_trainers_callback_asks_for_a_model_with_a_loss():
    model = nn.Linear(2, 2)
    callback = TrainerCallback()
    callback.on_train_begin(None, None, None, model=model, optimizer=SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="SharpnessCallback needs a model that computes its loss"):
        model(torch.ones(2))
    callback.on_train_end(None, None, None)
    model(torch.ones(2))

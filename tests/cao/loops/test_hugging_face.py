import warnings
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import flat_params, loss_of, seeded, smooth_network
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from cao import CAO, GaussNewton


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """Drop remarks about workers and devices, none of which are ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"transformers|accelerate|torch\.utils\.data")
        yield


def test_accelerate_takes_the_steps_of_a_plain_loop():
    accelerator = Accelerator(cpu=True)
    network = smooth_network()
    model, optimizer = accelerator.prepare(network, CAO(network.parameters(), 0.1, **SETTINGS))
    for data in BATCHES:
        loss = loss_of(model, data)
        optimizer.zero_grad()
        # Accelerate's wrapper hands on none of our methods; the optimizer itself is its attribute.
        optimizer.optimizer.refresh_if_due(loss)
        accelerator.backward(loss)
        optimizer.step()
    assert_as_in_the_plain_loop(network, optimizer.optimizer)


def test_accumulation_by_accelerate_leaves_the_curvature_alone():
    ends = []
    for steps in (1, 2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        network = smooth_network()
        model, optimizer = accelerator.prepare(network, CAO(network.parameters(), 0.1, **SETTINGS))
        for data in [data for data in BATCHES for _ in range(steps)]:
            with accelerator.accumulate(model):
                loss = loss_of(model, data)
                # The loss is divided in accelerator.backward, after this line.
                optimizer.optimizer.refresh_if_due(loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert_as_in_the_plain_loop(network, optimizer.optimizer)
        ends.append(flat_params(network))
    torch.testing.assert_close(*ends)


def tiny_gpt(attention: str = "eager") -> GPT2LMHeadModel:
    sizes = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": attention}
    return seeded(lambda: GPT2LMHeadModel(GPT2Config(**sizes, **quiet, bos_token_id=0, eos_token_id=0)))


def sentences(count: int = 16) -> list[dict[str, Tensor]]:
    words = torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(0))
    # The first word is never predicted, but the Trainer counts it among the items unless it is masked.
    labels = words.clone().index_fill(1, torch.tensor([0]), -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


class RefreshingTrainer(Trainer):
    """What a user writes: refresh where the loss is made, told what the model has divided it by."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            # A model that is given the number of items has divided by those of all accumulated parts.
            is_divided = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            parts = self.current_gradient_accumulation_steps if is_divided else 1
            self.optimizer.optimizer.refresh_if_due(loss, scale=1 / parts)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *_arguments):
        return SequentialSampler(self.train_dataset)


class FirstSketch(TrainerCallback):
    """Notes the first curvature found."""

    values: list[float] | None = None

    def on_step_end(self, *_arguments, optimizer, **_others):
        inner = getattr(optimizer, "optimizer", optimizer)
        self.values = self.values or inner.sketch.values


@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainer_of_transformers_takes_the_steps_of_a_plain_loop(parts, tmp_path):
    settings = {"rank": 2, "refresh_every": 2, "damping": 0.5}
    model, reference, data = tiny_gpt(), tiny_gpt(), sentences()
    optimizer, note = CAO(model.parameters(), 0.1, **settings), FirstSketch()
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=4 // parts,
        gradient_accumulation_steps=parts,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    RefreshingTrainer(
        model, arguments, train_dataset=data, data_collator=stacked, optimizers=(optimizer, None), callbacks=[note]
    ).train()

    plain, sketches = CAO(reference.parameters(), 0.1, **settings), []
    for start in range(0, len(data), 4):
        plain.zero_grad()
        for part in range(start, start + 4, 4 // parts):
            loss = reference(**stacked(data[part : part + 4 // parts])).loss
            plain.refresh_if_due(loss)
            (loss / parts).backward()
        plain.step()
        sketches.append(plain.sketch.values)
    # transformers computes the loss in float32.
    assert note.values == pytest.approx(sketches[0], rel=1e-4)
    torch.testing.assert_close(flat_params(model), flat_params(reference), rtol=1e-4, atol=1e-5)


class Logits(nn.Module):
    """A language model that returns a tensor, as GaussNewton wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        return self.model(words).logits


@pytest.mark.parametrize("kind", ["loss", "function", "gauss-newton"])
def test_fused_attention_of_transformers_works_or_is_explained(kind):
    model, inputs = tiny_gpt("sdpa"), stacked(sentences(4))
    optimizer = CAO(model.parameters(), 0.1, rank=2)

    def token_loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    if kind == "loss":
        with pytest.raises(RuntimeError, match=r'attention.*pass a function.*attn_implementation="eager"'):
            optimizer.refresh_if_due(model(**inputs).loss)
        return
    network = Logits(model)
    operator = GaussNewton(network, inputs["input_ids"], token_loss)
    optimizer.refresh_if_due(operator if kind == "gauss-newton" else lambda: token_loss(network(inputs["input_ids"])))
    eager = CAO((other := tiny_gpt()).parameters(), 0.1, rank=2)
    plain = Logits(other)
    operator = GaussNewton(plain, inputs["input_ids"], token_loss)
    eager.refresh_if_due(operator if kind == "gauss-newton" else token_loss(plain(inputs["input_ids"])))
    assert optimizer.sketch.values == pytest.approx(eager.sketch.values, rel=1e-6)

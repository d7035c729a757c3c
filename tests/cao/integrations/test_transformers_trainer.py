import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import flat_params, seeded, top_sketch
from torch import Tensor
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from cao import CAO
from cao.integrations.transformers import CAOMixin, CAOTrainer

QUICK = {"rank": 2, "refresh_every": 2, "damping": 2.0, "power_iterations": 2}
EXACT = {"rank": 1, "refresh_every": 2, "damping": 0.5, "power_iterations": 40, "eigensolver": "lanczos"}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """Drop remarks about workers and devices, none of which are ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"transformers|accelerate|torch\.utils\.data")
        yield


def tiny_gpt(attention: str = "sdpa", dropout: float = 0.0) -> GPT2LMHeadModel:
    """Return a language model of 300 parameters whose output layer is its embedding."""
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2}
    masks = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(**sizes, **masks, attn_implementation=attention, bos_token_id=0, eos_token_id=0)
    return seeded(lambda: GPT2LMHeadModel(config), torch.float32)


def sentences(*lengths: int) -> list[dict[str, Tensor]]:
    """Return sentences of these lengths, padded by labels that do not count."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        words = torch.randint(7, (6,), generator=generator)
        labels = words.clone().index_fill(0, torch.tensor([0, *range(length, 6)]), -100)
        found.append({"input_ids": words, "labels": labels})
    return found


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sharpness_by_hand(items: list[dict[str, Tensor]]) -> float:
    """Return the largest eigenvalue of the dense Hessian of the mean loss of some sentences alone."""
    model, inputs = tiny_gpt("eager"), stacked(items)
    named = dict(model.named_parameters())  # A tied parameter stands in it once.

    def loss_at(theta: Tensor) -> Tensor:
        pieces = theta.split([p.numel() for p in named.values()])
        replaced = {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        outputs = functional_call(model, replaced, kwargs={"input_ids": inputs["input_ids"]}, tie_weights=True)
        return token_loss(outputs.logits, inputs["labels"])

    return float(top_sketch(hessian(loss_at)(flat_params(model)), 1)[0])


class InOrder(CAOTrainer):
    """Takes the sentences as they come."""

    def _get_train_sampler(self, *_arguments):
        return SequentialSampler(self.train_dataset)


def trainer_for(
    model: GPT2LMHeadModel,
    data: list,
    folder: Path,
    *,
    lr: float = 0.1,
    settings=EXACT,
    build=InOrder,
    loss=None,
    **more,
) -> Trainer:
    """Return a trainer for one epoch in batches of two."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "lr_scheduler_type": "constant"}
    return build(
        model,
        TrainingArguments(folder, **{**quiet, **usual, "max_grad_norm": 0.0, **more}),
        train_dataset=data,
        data_collator=stacked,
        optimizers=(CAO(model.parameters(), lr, **settings), None),
        compute_loss_func=loss,
    )


def sharpness_of(data: list, folder: Path, **settings) -> float:
    """Return the sharpness that a trainer finds before its first step, at parameters that do not move."""
    trainer = trainer_for(tiny_gpt(), data, folder, lr=1e-30, **settings)
    trainer.train()
    assert trainer.optimizer.optimizer.counters.refreshes == 1
    return trainer.optimizer.optimizer.sketch.values[0]


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def mean_over_items(outputs, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Return the loss that a user's compute_loss_func returns: a sum, divided by the items of all parts."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("loss", [None, mean_over_items], ids=["the model's loss", "compute_loss_func"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_curvature_is_that_of_the_undivided_loss_of_the_first_part(parts, loss, tmp_path):
    # The parts have 6 and 2 words to predict: dividing by the number of parts would not do.
    data = sentences(4, 4, 2, 2)[: 2 * parts]
    found = sharpness_of(data, tmp_path, loss=loss, gradient_accumulation_steps=parts)
    assert found == pytest.approx(sharpness_by_hand(data[:2]), rel=1e-3)


class OwnLoss(InOrder):
    """Computes a loss of its own, which the Trainer divides."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return token_loss(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


def test_a_loss_that_the_trainer_divides_has_the_same_curvature(tmp_path):
    data = sentences(4, 4, 2, 2)
    found = sharpness_of(data, tmp_path, build=OwnLoss, gradient_accumulation_steps=2)
    assert found == pytest.approx(sharpness_by_hand(data[:2]), rel=1e-3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["stored", "checkpointed"])
def test_the_trainer_takes_the_steps_of_a_plain_loop(attention, is_checkpointed, tmp_path):
    model, reference, data = tiny_gpt(attention), tiny_gpt("eager"), sentences(*[6] * 8)
    trainer_for(model, data, tmp_path, settings=QUICK, gradient_checkpointing=is_checkpointed).train()
    plain = CAO(reference.parameters(), 0.1, **QUICK)
    for start in range(0, len(data), 2):
        inputs = stacked(data[start : start + 2])
        loss = token_loss(reference(input_ids=inputs["input_ids"]).logits, inputs["labels"])
        plain.zero_grad()
        plain.refresh_if_due(loss)
        loss.backward()
        plain.step()
    torch.testing.assert_close(flat_params(model), flat_params(reference), rtol=1e-4, atol=1e-5)


def test_a_refresh_moves_no_dropout_mask(tmp_path):
    losses = []
    for rank in (0, 1):
        # Parameters that stand still, so that only the masks decide the losses.
        settings = {**QUICK, "rank": rank}
        trainer = trainer_for(tiny_gpt(dropout=0.3), sentences(*[6] * 8), tmp_path, lr=1e-30, settings=settings)
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert len(set(losses[0])) == 4
    assert losses[0] == losses[1]


def test_the_logs_tell_the_sharpness(tmp_path):
    data = sentences(*[6] * 8)
    trainer = trainer_for(tiny_gpt(), data, tmp_path, lr=1e-30)
    trainer.train()
    expected = [sharpness_by_hand(data[:2])] * 2 + [sharpness_by_hand(data[4:6])] * 2
    assert logged(trainer, "cao/sharpness") == pytest.approx(expected, rel=1e-3)
    assert logged(trainer, "cao/refreshes") == [1, 1, 2, 2]


def test_a_trainer_goes_on_from_its_checkpoint(tmp_path):
    data, ends = sentences(*[6] * 12), []
    for stops in ([6], [3, 6]):
        model = tiny_gpt()
        for number, stop in enumerate(stops):
            saving = {"save_strategy": "steps", "save_steps": 3}
            trainer = trainer_for(model, data, tmp_path / str(len(stops)), settings=QUICK, max_steps=stop, **saving)
            trainer.train(resume_from_checkpoint=number > 0)
        ends.append((flat_params(model), trainer.optimizer.optimizer.counters))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_the_mixin_leaves_other_optimizers_alone(tmp_path):
    class Mixed(CAOMixin, Trainer):
        pass

    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(tmp_path, max_steps=1, **quiet)
    trainer = Mixed(tiny_gpt(), arguments, train_dataset=sentences(6, 6), data_collator=stacked)
    assert trainer.train().global_step == 1


def test_the_trainer_refuses_to_train_with_another_optimizer_in_silence(tmp_path):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(tmp_path, max_steps=1, **quiet)
    trainer = CAOTrainer(tiny_gpt(), arguments, train_dataset=sentences(6, 6), data_collator=stacked)
    with pytest.raises(ValueError, match=r"needs a CAO as its optimizer, got AdamW; pass optimizers=\(CAO"):
        trainer.train()


def test_a_trainer_that_makes_the_optimizer_itself_refreshes_it(tmp_path):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(tmp_path, max_steps=1, weight_decay=0.01, **quiet)
    made = {"optimizer_cls_and_kwargs": (CAO, {"lr": 0.1})}
    trainer = CAOTrainer(tiny_gpt(), arguments, train_dataset=sentences(6, 6), data_collator=stacked, **made)
    trainer.train()
    assert trainer.optimizer.optimizer.counters.refreshes == 1


def test_the_trainers_optimizer_has_a_report_and_the_like(tmp_path):
    trainer = trainer_for(tiny_gpt(), sentences(6, 6), tmp_path)
    trainer.train()
    assert trainer.optimizer.counters.refreshes == 1
    assert "refreshes  1," in str(trainer.optimizer.report())


def test_without_our_trainer_the_error_names_it(tmp_path):
    with pytest.raises(RuntimeError, match="under transformers CAOTrainer instead of Trainer"):
        trainer_for(tiny_gpt(), sentences(6, 6), tmp_path, build=Trainer).train()


def test_the_example_trains_and_logs_the_sharpness(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / "examples/hugging_face.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(printed.split("sharpness ")[1].split()[0]) > 0

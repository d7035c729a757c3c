"""CAO in the Trainer of transformers: `CAOTrainer` for `Trainer`, on a tiny GPT-2 that learns to count.

Run it with `python examples/hugging_face.py` after `pip install transformers accelerate`; it takes a few seconds. The
model has tied embeddings, trains on fused attention with checkpointing, and accumulates gradients over two parts.
"""

from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from cao import CAO
from cao.integrations.transformers import CAOTrainer


def counting_sentences(count: int = 128, words: int = 10, length: int = 8) -> list[dict[str, Tensor]]:
    starts = torch.randint(words, (count, 1))
    rows = (starts + torch.arange(length)) % words
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = CAO(model.parameters(), lr=0.1, momentum=0.9)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            lr_scheduler_type="constant",
            logging_steps=8,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = CAOTrainer(model, arguments, train_dataset=counting_sentences(), optimizers=(optimizer, None))
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']}, sharpness {entry['cao/sharpness']:.2f}")


if __name__ == "__main__":
    main()

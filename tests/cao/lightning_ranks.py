"""What Lightning trains in two processes; a module that a new process can import."""

from pathlib import Path

import lightning
import torch
from small_models import batch, flat_params, loss_of, smooth_network
from torch import Tensor

from cao import CAO

SETTINGS = {"rank": 2, "refresh_every": 3, "damping": 0.5, "momentum": 0.9, "power_iterations": 4}
BATCHES = [batch(16, seed=seed) for seed in range(5)]


class HalfBatches(lightning.LightningModule):
    """Takes its process's half of each batch, and leaves what it came to in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network, self.folder = smooth_network(), folder

    def training_step(self, data: tuple[Tensor, Tensor], _index: int) -> Tensor:
        inputs, labels = (tensor.chunk(self.trainer.world_size)[self.global_rank] for tensor in data)
        return loss_of(self.network, (inputs, labels))

    def configure_optimizers(self) -> CAO:
        return CAO(self.network.parameters(), 0.1, **SETTINGS)

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        end = (flat_params(self.network), optimizer.sketch.values, tuple(optimizer.counters))
        torch.save(end, self.folder / f"rank{self.global_rank}")

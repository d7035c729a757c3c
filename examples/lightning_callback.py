"""CAO in Lightning: one more word in `Trainer(callbacks=...)`, here with accumulation and clipping.

Run it with `python examples/lightning_callback.py` after `pip install lightning`; it takes a few seconds.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cao import CAO
from cao.integrations.lightning import CAOCallback


class Digits(lightning.LightningModule):
    """An ordinary module: nothing in it knows of curvature, except that its optimizer is a CAO."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        inputs, targets = batch
        loss = cross_entropy(self.network(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> CAO:
        return CAO(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = lightning.Trainer(
        max_epochs=5,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[CAOCallback()],  # The only new word.
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True))
    metrics = trainer.callback_metrics
    print(
        f"loss {metrics['loss']:.3f}, sharpness {metrics['cao/sharpness']:.1f} after {metrics['cao/refreshes']:.0f} "
        f"refreshes, which took {metrics['cao/total_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main()

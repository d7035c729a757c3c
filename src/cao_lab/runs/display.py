"""What a run shows while it lasts: a progress bar on a terminal, and scalars for TensorBoard if asked for."""

import sys
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from cao_lab.config import ConfigError, Execution
from cao_lab.log.records import EpochRecord
from cao_lab.runs.training import Training, steps_between_reads

SHOWN_ON_TENSORBOARD = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "hessian_products")


class Display:
    """The progress bar and the TensorBoard writer of one run; both may be absent."""

    def __init__(self, training: Training, folder: Path, execution: Execution) -> None:
        self.training = training
        self.samples = len(training.task.dataset.train_inputs)
        self.eigenvalue = ""
        self.test_accuracy = ""
        is_first = training.ranks.is_first
        self.bar = self._progress_bar(is_shown=is_first and sys.stderr.isatty())
        is_written = is_first and execution.tensorboard
        self.writer = tensorboard_writer()(str(folder / "tensorboard")) if is_written else None

    def __enter__(self) -> Self:
        """Show nothing yet: the bar is there already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal in order."""
        self.bar.close()
        if self.writer is not None:
            self.writer.close()

    def _progress_bar(self, is_shown: bool) -> "tqdm[Any]":
        config, progress = self.training.config, self.training.progress
        return tqdm(
            desc=f"{config.task} {config.label} seed {config.seed}",
            total=config.epochs * self.samples,
            initial=progress.epoch * self.samples + progress.samples,
            unit=" images",
            unit_scale=True,
            disable=not is_shown,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}% |{bar:16}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )

    def step(self) -> None:
        """Show where the run is; the bar limits itself to ten times a second."""
        progress = self.training.progress
        if self.bar.disable or progress.batch % steps_between_reads(self.training.device):
            return
        if self.training.new_refreshes:
            first = next((row for row in self.training.new_refreshes if row.index == 1), None)
            self.eigenvalue = f" λ₁ {first.eigenvalue:.3g}" if first else self.eigenvalue
        accuracy = f" acc {progress.correct / progress.samples:.3f}" if progress.correct else ""
        text = f"epoch {progress.epoch + 1} loss {progress.train_loss:.4f}{accuracy}"
        self.bar.set_postfix_str(text + self.test_accuracy + self.eigenvalue, refresh=False)
        self.bar.update(progress.epoch * self.samples + progress.samples - self.bar.n)

    def epoch(self, record: EpochRecord) -> None:
        """Take in the numbers of an epoch."""
        if record.test_accuracy is not None:
            self.test_accuracy = f" test {record.test_accuracy:.3f}"
        if self.writer is not None:
            shown = {name: getattr(record, name) for name in SHOWN_ON_TENSORBOARD}
            for name in (name for name, value in shown.items() if value is not None):
                self.writer.add_scalar(name, shown[name], record.epoch)


def tensorboard_writer() -> Any:
    """Return the class that writes for TensorBoard, if that is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import
    except ImportError as error:
        raise ConfigError("--tensorboard needs TensorBoard: pip install tensorboard") from error
    return SummaryWriter

"""One run in memory: a generator that yields a record an epoch, and can be stopped and continued after any step."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cao import Eigenpairs
from cao_lab.config import ConfigError, RunConfig
from cao_lab.log.records import EpochRecord, RefreshRecord
from cao_lab.runs import sharpness
from cao_lab.runs.loss import BatchLoss, TrainingTask
from cao_lab.runs.meter import Meter
from cao_lab.runs.ranks import ALONE, Ranks
from cao_lab.runs.stepper import Refreshed
from cao_lab.tasks.data import Batch, Dataset, batches, evaluation_batches
from cao_lab.tasks.problems import channels_last

EVALUATION_BATCH = 500
STEPS_BETWEEN_READS = 16
"""Steps after which a GPU is asked for the loss; a run that has diverged takes at most so many in vain."""


@dataclass
class Progress:
    """How far a run has come, and the sums of the epoch it is in."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    gradient_evaluations: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0
    has_diverged: bool = False

    def check(self, epochs: int, steps_per_epoch: int) -> None:
        """Refuse what a run of so many epochs never comes to."""
        for name, value in vars(self).items():
            kind = type(getattr(Progress, name))
            if type(value) is not kind or (kind is int and value < 0):
                raise ValueError(f"progress has {name} {value!r}")
        is_step_right = self.has_diverged or self.step == self.epoch * steps_per_epoch + self.batch
        if self.epoch > epochs or self.batch > steps_per_epoch or not is_step_right:
            raise ValueError(f"progress is at step {self.step}, batch {self.batch} of epoch {self.epoch} of {epochs}")

    def complete_epoch(self) -> None:
        """Count the epoch as completed and clear its sums."""
        self.epoch += 1
        self.batch = self.samples = self.correct = 0
        self.loss_sum = 0.0

    @property
    def train_loss(self) -> float:
        """Mean loss of the epoch so far."""
        return self.loss_sum / self.samples if self.samples else math.nan


def ignore(_: "Training") -> None:
    """Do nothing after a step."""


class Training:
    """A model, its optimizer and the progress made: everything that decides the next step."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, device: torch.device | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.config, self.ranks = config, ranks
        self.device = device or torch.device("cpu")
        torch.manual_seed(config.seed)
        self.task = TrainingTask(config, dataset, self.device, ranks)
        self.model = self.task.model
        try:
            self.method = config.optimizer.build(self.model, config.seed)
        except ValueError as error:  # Its settings are the user's, and what is wrong with them is the library's word.
            raise ConfigError(str(error)) from error
        self.base_rates = [float(group["lr"]) for group in self.method.optimizer.param_groups]
        self.progress = Progress()
        self._tally = torch.zeros(2, dtype=torch.float64, device=self.device)
        """Loss and right answers of the epoch so far; `progress` has them as they were last read."""
        self.meter = Meter(self.device)
        self.new_refreshes: list[RefreshRecord] = []
        size = len(self.task.dataset.train_inputs)
        self.steps_per_epoch = math.ceil(size / (config.batch_size or size))

    def epochs(self, after_step: Callable[["Training"], None] = ignore) -> Iterator[EpochRecord]:
        """Train to the end of the budget; a non-finite loss ends the run with the epoch it falls into.

        `after_step` is called between two steps and may raise to stop the run there. It is on the clock, because to
        stop the clock is to wait for a GPU; whatever takes long belongs into `meter.excluded()`.
        """
        while self.progress.epoch < self.config.epochs and not self.progress.has_diverged:
            self._train_epoch(after_step)
            record = self._epoch_record()
            self.progress.complete_epoch()
            self._tally.zero_()
            self.meter.seconds = 0.0
            yield record

    def _train_epoch(self, after_step: Callable[["Training"], None]) -> None:
        config, progress = self.config, self.progress
        self.model.train()
        self.meter.start()
        for batch in batches(
            self.task.dataset,
            config.batch_size,
            seed=config.seed,
            epoch=progress.epoch,
            is_heavy=config.augmentation == "heavy",
            start=progress.batch,
            share=self.ranks.share,
        ):
            self._train_batch(*self.task.cast(batch))
            if progress.batch % steps_between_reads(self.device) == 0 or progress.batch == self.steps_per_epoch:
                self.read_tally()
            after_step(self)
            if progress.has_diverged:
                break
        self.meter.stop()

    def _train_batch(self, inputs: Tensor, targets: Tensor) -> None:
        progress, size = self.progress, self._batch_size()
        self._set_rate()
        monitor = self._monitor if self._is_monitoring_due() else None
        weight = self.ranks.share.weight(size)
        batch_loss = BatchLoss(self.task, inputs, targets, progress.step, monitor, weight)
        self.method.step(batch_loss, self._note_refresh)
        progress.batch += 1
        progress.step += 1
        progress.gradient_evaluations += batch_loss.evaluations
        count = size * self._count(targets) // len(targets)
        progress.samples += count
        first, outputs = batch_loss.first_loss, batch_loss.first_outputs
        assert first is not None
        assert outputs is not None
        correct = self._correct(outputs, targets) if weight else torch.zeros_like(first)
        loss, correct = self.ranks.sums(torch.stack([first.double(), correct.double()]))
        self._tally += torch.stack([loss / self.ranks.count * count, correct])

    def read_tally(self) -> None:
        """Take loss and right answers over from the device, for which the host has to wait; NaN never goes away."""
        self.progress.loss_sum, correct = self._tally.tolist()
        self.progress.correct = int(correct)
        self.progress.has_diverged |= not math.isfinite(self.progress.loss_sum)

    def _batch_size(self) -> int:
        """Return the samples of the batch that comes next, in all processes."""
        size = len(self.task.dataset.train_inputs)
        length = self.config.batch_size or size
        return min(length, size - self.progress.batch * length)

    def _set_rate(self) -> None:
        factor = rate_factor(self.config.schedule, self.progress.step, self.config.epochs * self.steps_per_epoch)
        for group, rate in zip(self.method.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def _count(self, targets: Tensor) -> int:
        """Return how many answers a batch asks for: a window of text asks for one at each character."""
        return len(targets) if self.task.dataset.classes is None else targets.numel()

    def _correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.task.dataset.classes is None:
            return torch.zeros((), device=self.device)
        return (outputs.argmax(dim=1) == targets).sum()

    def _is_monitoring_due(self) -> bool:
        return self.config.monitor_curvature > 0 and self.progress.batch == 0

    def _monitor(self, batch_loss: BatchLoss, loss: Tensor) -> None:
        if self.method.tells_its_eigenvalues():
            return
        with self.meter.excluded():
            operator = batch_loss.curvature(loss)
            count = self.config.monitor_curvature
            pairs = sharpness.eigenvalues_outside(operator, None, count, seed=self.progress.step)
            self._log_eigenvalues(None, pairs, None)

    def _note_refresh(self, refreshed: Refreshed) -> None:
        with self.meter.excluded():
            captured = refreshed.eigenpairs()
            count = max(1, self.config.monitor_curvature - len(captured.values))
            others = sharpness.eigenvalues_outside(refreshed.operator, captured.vectors, count, seed=self.progress.step)
            self._log_eigenvalues(captured, others, refreshed.damping)

    def _log_eigenvalues(self, captured: Eigenpairs | None, others: Eigenpairs, damping: float | None) -> None:
        self.new_refreshes += sharpness.rows(
            captured,
            others,
            step=self.progress.step,
            steps_per_epoch=self.steps_per_epoch,
            damping=damping,
            hessian_products=self.method.hessian_products(),
        )

    def _epoch_record(self) -> EpochRecord:
        progress, has_classes = self.progress, self.task.dataset.classes is not None
        test_loss, test_accuracy = (math.nan, math.nan) if progress.has_diverged else self.evaluate()
        return EpochRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            train_loss=progress.train_loss,
            train_accuracy=progress.correct / progress.samples if has_classes else None,
            test_loss=test_loss,
            test_accuracy=test_accuracy if has_classes else None,
            lr=self.method.optimizer.param_groups[0]["lr"],
            train_seconds=round(self.meter.seconds, 6),
            peak_memory_mib=round(self.meter.peak_memory_mib, 1),
            peak_memory_source=self.meter.peak_memory_source,
            gradient_evaluations=progress.gradient_evaluations,
            hessian_products=self.method.hessian_products(),
            refreshes=self.method.refreshes(),
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return loss (without the L2 term) and accuracy on the test set."""
        self.model.eval()
        self.ranks.share_buffers(self.model)
        dataset = self.task.dataset
        own = [self._sums(batch) for batch in evaluation_batches(dataset, EVALUATION_BATCH, self.ranks.share)]
        # Once for all batches, because to read a number is to wait for the GPU.
        read = torch.stack(own).tolist() if own else []
        losses, correct = zip(*self.ranks.in_turn([(loss, int(right)) for loss, right in read]), strict=True)
        samples = self._count(dataset.test_targets)
        return sum(losses) / samples, sum(correct) / samples

    def _sums(self, batch: Batch) -> Tensor:
        """Return the sums over a batch of the loss and of what is right, on the device."""
        inputs, targets = self.task.cast(batch)
        with self.task.autocast():
            outputs = self.model(channels_last(inputs, self.model))
            loss = self.task.loss_of_outputs(outputs, targets)
        return torch.stack([loss.double() * self._count(targets), self._correct(outputs, targets).double()])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the next step, as plain data and tensors."""
        self.read_tally()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.method.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "seconds": self.meter.seconds,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; if that fails, the training is of no further use."""
        self.progress = Progress(**state["progress"])
        self.progress.check(self.config.epochs, self.steps_per_epoch)
        self._tally[0], self._tally[1] = self.progress.loss_sum, self.progress.correct
        self.model.load_state_dict(state["model"])
        self.method.optimizer.load_state_dict(state["optimizer"])
        self.meter.seconds = float(state["seconds"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["random_cuda"])


def steps_between_reads(device: torch.device) -> int:
    """Return after how many steps the loss is read: on a CPU, where nothing waits, after each."""
    return 1 if device.type == "cpu" else STEPS_BETWEEN_READS


def rate_factor(schedule: str, step: int, steps: int) -> float:
    """Return what the learning rate is multiplied by at a step of the budget."""
    share = step / steps
    if schedule == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    return 0.1 ** ((share >= 0.5) + (share >= 0.75)) if schedule == "step" else 1.0

"""What an optimizer minimises: the loss of a batch as a function of the parameters, and its curvature."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cao import Hessian
from cao.curvature.operators import ParameterOperator
from cao_lab.config import ConfigError, RunConfig
from cao_lab.runs.curvature import SampledLoss
from cao_lab.runs.ranks import ALONE, Ranks
from cao_lab.tasks.data import Batch, Dataset, curvature_batch
from cao_lab.tasks.problems import build_model, channels_last, dataset_for, loss_function, regularizer


class TrainingTask:
    """A model, its data and its loss, in the precision and on the device of the run."""

    def __init__(self, config: RunConfig, dataset: Dataset, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.config, self.ranks = config, ranks
        dataset = dataset_for(config.model, dataset)
        size = len(dataset.train_inputs)
        if config.curvature_samples is not None and config.curvature_samples > size:
            raise ConfigError(f"curvature_samples must be at most {size}, got {config.curvature_samples}")
        self.dataset = dataset.to(device)
        self.device = device
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        model = build_model(config.model, dataset, config.width, config.seed)
        self.model: nn.Module = model.to(device=device, dtype=self.dtype)
        self.replica = ranks.replica(self.model)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.loss_of_outputs = loss_function(config.model, dataset)

    def loss(self, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
        """Run the model and return the loss, weighted, with its L2 term, and the outputs."""
        with self.autocast():
            outputs = self.replica(inputs)
            loss = self.loss_of_outputs(outputs, targets)
        loss = loss if weight == 1 else loss * weight
        return (loss + regularizer(self.model, self.config.l2) if self.config.l2 else loss), outputs

    def autocast(self) -> AbstractContextManager[object]:
        """Return the precision in which the model runs."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def cast(self, batch: Batch) -> Batch:
        """Return a batch in the model's precision, class labels as they are."""
        inputs, targets = batch
        return inputs.to(self.dtype), targets.to(self.dtype) if targets.is_floating_point() else targets


@dataclass
class BatchLoss:
    """The loss of one batch. Calling it is a forward pass; the first call is the one that the log tells of."""

    task: TrainingTask
    inputs: Tensor
    targets: Tensor
    step: int
    on_first_loss: Callable[["BatchLoss", Tensor], None] | None = None
    weight: float = 1.0
    """What this process's share of the batch counts among those of all processes."""
    evaluations: int = 0
    first_loss: Tensor | None = None
    first_outputs: Tensor | None = None

    def __call__(self, *, is_differentiated_twice: bool = False) -> Tensor:
        """Return the loss with its graph."""
        # Hessian products are slower with the channels last, so they use the default layout.
        inputs = self.inputs if is_differentiated_twice else channels_last(self.inputs, self.task.model)
        loss, outputs = self.task.loss(inputs, self.targets, self.weight)
        self.evaluations += 1
        if self.evaluations == 1:
            self.first_loss, self.first_outputs = loss.detach(), outputs.detach()
            if self.on_first_loss is not None:
                self.on_first_loss(self, loss)
        return loss

    def value(self, loss: Tensor) -> Tensor:
        """Return what a loss amounts to on the batch of all processes."""
        return self.task.ranks.mean(loss.detach())

    @property
    def is_curvature_of_the_graph(self) -> bool:
        """Whether the curvature is made from the graph of the training loss, and not from passes of its own."""
        return self.task.config.is_curvature_of_the_graph

    def curvature(self, loss: Tensor | None) -> ParameterOperator:
        """Return the matrix that the run's config names, as a mean over all processes."""
        return self.task.ranks.mean_operator(self._own_curvature(loss))

    def _own_curvature(self, loss: Tensor | None) -> ParameterOperator:
        """Return the matrix of this process's share: of the loss, or of another sample taken in parts."""
        config, task = self.task.config, self.task
        if loss is not None and self.is_curvature_of_the_graph:
            return Hessian(loss, task.params)
        parts = list(self._parts())
        if config.curvature == "gauss-newton":
            parts = [(channels_last(inputs, task.model), targets) for inputs, targets in parts]
        sampled = SampledLoss(task.model, self._weighted_loss, parts, config.l2, task.autocast)
        return sampled.curvature(config.curvature)

    def _weighted_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.task.loss_of_outputs(outputs, targets)
        is_of_the_batch = self.task.config.curvature_samples is None
        return loss * self.weight if is_of_the_batch and self.weight != 1 else loss

    def _parts(self) -> Iterator[Batch]:
        config, task = self.task.config, self.task
        if config.curvature_samples is None:
            yield self.inputs, self.targets
            return
        samples, share = config.curvature_samples, task.ranks.share
        batch = curvature_batch(task.dataset, samples, seed=config.seed, step=self.step, share=share)
        inputs, targets = task.cast(batch)
        # Parts of equal size, so that the mean over parts is the mean over samples.
        parts = math.ceil(len(targets) / config.curvature_part)
        size = len(targets) // parts
        yield from zip(inputs[: parts * size].split(size), targets[: parts * size].split(size), strict=True)

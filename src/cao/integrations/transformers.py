"""CAO with transformers: use `CAOTrainer` instead of `Trainer`, with a CAO as its optimizer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from cao.integrations.watching import Watch, scalars
from cao.optimizer import CAO


class CAOMixin:
    """Stands before any Trainer class: `class MyTrainer(CAOMixin, SFTTrainer)`.

    When a refresh is due, the loss of the next micro-batch is computed again for each sweep of the eigensolver, as if
    it were the whole batch, so accumulation does not divide the curvature. These forward passes use the attention
    kernel that can be differentiated twice, whatever the model trains with; dropout masks, buffers and random streams
    stay as they are. The results go to the Trainer's logs.
    """

    optimizer: Any
    args: Any
    get_batch_samples: Callable[..., Any]
    compute_loss: Callable[..., Any]
    compute_loss_context_manager: Callable[[], Any]
    _prepare_inputs: Callable[..., Any]
    _watch: Watch | None = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Refresh if one is due, then train."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper has no such methods.
        if isinstance(optimizer, CAO):
            if self._watch is None or self._watch.optimizer is not optimizer:
                self._watch = Watch(optimizer)
            if optimizer.is_refresh_due:
                model.train()
                optimizer.refresh_if_due(self._loss_function(model, inputs, num_items_in_batch is not None))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **settings: Any) -> None:
        """Add what the last refresh found."""
        found = scalars(self._watch.latest if self._watch else None)
        super().log({**logs, **found}, *arguments, **settings)  # type: ignore[misc]

    def _loss_function(self, model: nn.Module, inputs: dict[str, Any], counts_items: bool) -> Callable[[], Tensor]:
        """Return the loss of these inputs alone, undivided, as a function that runs the model."""
        # Every process takes part in the count, outside the function, which may fail in one of them.
        items = self.get_batch_samples(iter([inputs]), 1, self.args.device)[1] if counts_items else None
        prepared = self._prepare_inputs(inputs)

        def loss() -> Tensor:
            with self.compute_loss_context_manager():
                # A copy, because labels are popped from it.
                found: Tensor = self.compute_loss(model, dict(prepared), num_items_in_batch=items)
            return found

        return loss


class CAOTrainer(CAOMixin, Trainer):
    """The Trainer of transformers, which keeps the curvature of a CAO fresh."""

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Refuse to train with another optimizer, which would do so in silence; else refresh and train."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, CAO):
            raise ValueError(
                f"CAOTrainer needs a CAO as its optimizer, got {type(optimizer).__name__}; pass "
                "optimizers=(CAO(model.parameters(), lr=0.1), None), or optimizer_cls_and_kwargs=(CAO, {'lr': 0.1})"
            )
        return super().training_step(model, inputs, num_items_in_batch)

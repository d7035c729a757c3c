"""CAO with transformers: use `CAOTrainer` instead of `Trainer`, with a CAO as its optimizer."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from cao.autograd.isolation import twice_differentiable
from cao.cao import CAO
from cao.integrations.prepared import with_own_methods
from cao.integrations.watching import Watch, scalars
from cao.watch import Sharpness


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
        with_own_methods(self.optimizer)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
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


class SharpnessCallback(TrainerCallback):
    """Watches how close the optimizer is to the edge of stability: `Trainer(callbacks=[SharpnessCallback(every=100)])`.

    The settings are those of `Sharpness`; name a logger with `tell`. It sees the loss that the model itself computes
    from its labels, undivided by accumulation, which is not the one that is trained under label smoothing or with a
    loss function of your own.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.watch: Sharpness | None = None
        self._model, self._forward = ExitStack(), ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Begin to watch the model's forward passes."""
        self.watch = Sharpness(known["optimizer"], **self.settings)
        self._model.callback(known["model"].register_forward_pre_hook(self._before).remove)
        self._model.callback(known["model"].register_forward_hook(self._after, with_kwargs=True).remove)
        self._model.callback(self.watch.remove)

    def on_substep_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Go back to the usual kernels: not before the backward pass, which runs checkpointed layers again."""
        self._forward.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Go back to the usual kernels."""
        self._forward.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Leave the model alone; the readings stay."""
        self._forward.close()
        self._model.close()

    def _is_looking(self, model: nn.Module) -> bool:
        return model.training and torch.is_grad_enabled() and self.watch is not None and self.watch.is_due

    def _before(self, model: nn.Module, _inputs: Any) -> None:
        if self._is_looking(model):
            self._forward.enter_context(twice_differentiable())

    def _after(self, model: nn.Module, _inputs: Any, known: dict[str, Any], outputs: Any) -> None:
        if not self._is_looking(model) or self.watch is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            raise ValueError(
                "SharpnessCallback needs a model that computes its loss from its labels; without one, make a "
                "Sharpness(optimizer) and call it before the backward pass of your own training_step"
            )
        items = known.get("num_items_in_batch")  # Of all parts of the batch: the loss is divided by it.
        self.watch(loss, scale=1.0 if items is None else float(known["labels"].ne(-100).sum() / items))

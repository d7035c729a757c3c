"""CAO with Lightning, `Trainer(callbacks=[CAOCallback()])`, where `configure_optimizers` returns a CAO.

`SharpnessCallback` watches any optimizer of torch.
"""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor

from cao.autograd.isolation import twice_differentiable
from cao.cao import CAO
from cao.integrations.watching import Watch, scalars
from cao.readings import scalars as numbers_of
from cao.watch import Sharpness


class CAOCallback(Callback):
    """Refreshes the curvature before the backward pass at which it is due, and logs what it found.

    The curvature is that of the loss that `training_step` returned, although Lightning divides the loss by
    `accumulate_grad_batches` and, under fp16, scales it. A batch with a refresh runs uncompiled, on the attention
    kernel that can be differentiated twice; all other batches run as usual. Clipping, precision,
    DistributedDataParallel and checkpoints need nothing more.
    """

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._forward = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take part in Lightning's search for a learning rate, which puts all callbacks aside while it trains."""
        if not any(isinstance(callback, LearningRateFinder) for callback in trainer.callbacks):
            return

        def start() -> None:
            del pl_module.on_train_start
            if self not in trainer.callbacks:
                trainer.callbacks.append(self)
                self.on_train_start(trainer, pl_module)
            pl_module.on_train_start()

        pl_module.on_train_start = start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "CAOCallback does not know which loss belongs to which optimizer under manual optimization; leave it "
                "out, and call self.optimizers().refresh_if_due(loss) before self.manual_backward(loss)"
            )
        (optimizer,) = trainer.optimizers  # Lightning itself refuses several under automatic optimization.
        if not isinstance(optimizer, CAO):
            raise ValueError(f"CAOCallback needs a CAO from configure_optimizers, got {type(optimizer).__name__}")
        self._watch = Watch(optimizer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """If a refresh is due, make this forward pass one that can be differentiated twice."""
        self._forward.close()
        if self._watch and self._watch.optimizer.is_refresh_due:
            self._forward.enter_context(twice_differentiable())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Refresh if one is due."""
        if self._watch is None:
            return
        if self._watch.optimizer.refresh_if_due(loss, scale=scale_of(trainer)):
            pl_module.log_dict(scalars(self._watch.latest))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go back to the usual kernels: not before the backward pass, which runs checkpointed layers again."""
        self._forward.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizer as it was."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the optimizer as it was."""
        self._close()

    def _close(self) -> None:
        self._forward.close()
        if self._watch:
            self._watch.remove()
        self._watch = None


class SharpnessCallback(Callback):
    """Watches how close the optimizer is to the edge of stability, and logs it: `SharpnessCallback(every=100)`.

    The settings are those of `Sharpness`. Its state is saved with Lightning's checkpoints.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.watch: Sharpness | None = None
        self._forward = ExitStack()
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ValueError(
                "SharpnessCallback watches one optimizer under automatic optimization; with several, or under manual "
                "optimization, make a Sharpness(optimizer) of each and call it before self.manual_backward(loss)"
            )
        self.watch = Sharpness(trainer.optimizers[0], **self.settings)
        if self._saved:
            self.watch.load_state_dict(self._saved)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """If a look is due, make this forward pass one that can be differentiated twice."""
        self._forward.close()
        if self.watch and self.watch.is_due:
            self._forward.enter_context(twice_differentiable())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Look if it is time to."""
        if self.watch and (reading := self.watch(loss, scale=scale_of(trainer))):
            pl_module.log_dict(numbers_of(reading))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go back to the usual kernels."""
        self._forward.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizer alone; the readings stay."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the optimizer alone."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
        return self.watch.state_dict() if self.watch else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the optimizer is known."""
        self._saved = state_dict

    def _close(self) -> None:
        self._forward.close()
        if self.watch:
            self.watch.remove()


def scale_of(trainer: Trainer) -> float:
    """Return the factor between the loss that `training_step` returned and the one that is differentiated."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale: float = (scaler.get_scale() if scaler else 1.0) / trainer.accumulate_grad_batches
    return scale

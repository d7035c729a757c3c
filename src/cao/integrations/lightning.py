"""CAO with Lightning: `Trainer(callbacks=[CAOCallback()])`, where `configure_optimizers` returns a CAO."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cao.autograd.isolation import uncompiled, without_fast_path
from cao.integrations.watching import Watch, scalars
from cao.optimizer import CAO


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
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = (scaler.get_scale() if scaler else 1.0) / trainer.accumulate_grad_batches
        if self._watch.optimizer.refresh_if_due(loss, scale=scale):
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


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Let models run on kernels that have second derivatives."""
    with sdpa_kernel(SDPBackend.MATH), without_fast_path(), uncompiled():
        yield

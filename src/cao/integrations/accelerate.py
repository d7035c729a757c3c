"""CAO with Accelerate: an `Accelerator` whose `prepare` keeps the optimizer's own methods within reach."""

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from cao.integrations.prepared import with_own_methods


class Accelerator(accelerate.Accelerator):
    """Accelerate's own, except that `prepare` keeps `refresh_if_due` within reach.

    Refresh before `accelerator.backward(loss)`, which divides and scales the loss.
    """

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer for the devices and processes at hand."""
        return with_own_methods(super().prepare_optimizer(optimizer, device_placement))

"""How large a benchmark is: the full one of the record, and a quick one that shows that everything works."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes and numbers of repetitions of one benchmark."""

    width: int
    """Width of the ResNet-18."""
    wide: int | None
    """A second width, for the rows where one step is enough; None leaves them out."""
    batch: int
    parts: int
    """Parts of equal size into which a batch is cut for the Hessian in parts."""
    step_width: int
    """Width of the ResNet-18 whose optimizer step is timed alone: 64 has 11 million parameters."""
    small_tensors: int
    step_rounds: int
    refresh_rounds: int
    optimizer_rounds: int
    default_steps: int
    """Training steps with the default rules in each of two stretches: the first ones, and the next."""
    default_batch: int
    memory_rounds: int


FULL = Sizes(
    width=16, wide=64, batch=128, parts=4, step_width=64, small_tensors=1000,
    step_rounds=40, refresh_rounds=5, optimizer_rounds=50, memory_rounds=3, default_steps=400, default_batch=64,
)  # fmt: skip

QUICK = Sizes(
    width=8, wide=None, batch=16, parts=4, step_width=64, small_tensors=1000,
    step_rounds=7, refresh_rounds=3, optimizer_rounds=15, memory_rounds=1, default_steps=40, default_batch=16,
)  # fmt: skip

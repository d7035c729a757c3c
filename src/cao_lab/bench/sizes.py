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
    burn_in: int
    """Training steps before the sketch that becomes the warm start."""
    training_steps: int
    """Training steps between that sketch and its use."""
    fresh_batches: int
    race_rounds: int
    solver_products: int
    """Products after which an eigensolver that has not converged gives up."""
    scaling_rounds: int
    parameters: tuple[int, ...]
    """Numbers of parameters for the growth with n at rank 1; the last is left out at rank 8."""
    ranks: tuple[int, ...]
    """Ranks for the growth with k."""
    rank_parameters: int
    """Number of parameters for the growth with k."""
    solver_width: int
    """Width of the physics-informed network of the full-batch solver: 200 has 81,201 parameters."""
    solver_points: int
    solver_iterations: int


FULL = Sizes(
    width=16, wide=64, batch=128, parts=4, step_width=64, small_tensors=1000,
    step_rounds=40, refresh_rounds=5, optimizer_rounds=50, memory_rounds=3,
    default_steps=400, default_batch=64,
    burn_in=100, training_steps=400, fresh_batches=3, race_rounds=3, solver_products=60,
    scaling_rounds=5, parameters=(10**5, 10**6, 10**7, 10**8), ranks=(1, 2, 4, 8, 16, 32), rank_parameters=10**6,
    solver_width=200, solver_points=10_000, solver_iterations=9,
)  # fmt: skip

QUICK = Sizes(
    width=8, wide=None, batch=16, parts=4, step_width=64, small_tensors=1000,
    step_rounds=7, refresh_rounds=3, optimizer_rounds=15, memory_rounds=1,
    default_steps=40, default_batch=16,
    burn_in=20, training_steps=40, fresh_batches=1, race_rounds=1, solver_products=60,
    scaling_rounds=3, parameters=(10**5, 10**6, 10**7), ranks=(1, 2, 4, 8), rank_parameters=10**5,
    solver_width=100, solver_points=2_000, solver_iterations=5,
)  # fmt: skip

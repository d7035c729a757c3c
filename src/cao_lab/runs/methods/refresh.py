"""A refresh of CAO within a run: the sketch, or a control in its place, and what the log is told of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cao import CAO, Eigenpairs
from cao.curvature import ParameterOperator
from cao.linalg import lanczos, orthonormalize, random_columns, subspace_iteration
from cao_lab.runs.methods.method import OnRefresh, Refreshed

if TYPE_CHECKING:
    from cao_lab.runs.methods.cao import CAOConfig

# λ → ∞ for the projected-out control: λ/(λ + η) is 1 to the last bit of float32.
INFINITE_CURVATURE = 1e12
# Added to the seed of a control, so that its directions differ from the vectors the eigensolver starts from.
# Below 2³², because torch's generator looks at the lower 32 bits of a seed only.
CONTROL_STREAM = 0x9E3779B9


def refresh(optimizer: CAO, operator: ParameterOperator, config: "CAOConfig", on_refresh: OnRefresh) -> None:
    """Refresh the sketch, or put a control in its place, and tell of it if something finite came out."""
    # The lower 32 bits are all that torch's generator looks at.
    stream = hash((optimizer.param_groups[0]["seed"], optimizer.counters.steps)) % 2**31
    true = None if config.sketch == "top" else top_eigenpairs(operator, config, seed=stream)
    optimizer.refresh(operator if true is None else control(true, config, seed=stream))
    if has_fresh_sketch(optimizer):
        assert optimizer.sketch is not None
        # Putting the vectors together takes memory that only the log needs, so that is left to whoever writes it.
        captured = (lambda: true) if true is not None else lambda: captured_eigenpairs(optimizer, operator.params)
        on_refresh(Refreshed(operator, captured, optimizer.sketch.damping))


def has_fresh_sketch(optimizer: CAO) -> bool:
    """Whether the sketch in use was made for the step that comes next."""
    return optimizer.sketch is not None and optimizer.sketch.step == optimizer.counters.steps


def captured_eigenpairs(optimizer: CAO, params: Sequence[Tensor]) -> Eigenpairs:
    """Return the sketch in use, its vectors put together from the optimizer's state."""
    sketch = optimizer.sketch
    assert sketch is not None
    columns = [
        torch.cat([optimizer.state[p][f"vector_{index}"].reshape(-1) for p in params])
        for index in range(len(sketch.values))
    ]
    vectors = torch.stack(columns).T
    return Eigenpairs(vectors.new_tensor(sketch.values), vectors, vectors.new_tensor(sketch.residuals))


def top_eigenpairs(operator: ParameterOperator, config: "CAOConfig", seed: int) -> Eigenpairs:
    """Return what CAO itself would have found from a cold start."""
    solve = lanczos if config.eigensolver == "lanczos" else subspace_iteration
    start = random_block(operator.params, config.rank, seed)
    return solve(operator, start, config.power_iterations, tolerance=config.tolerance)


def control(true: Eigenpairs, config: "CAOConfig", seed: int) -> Eigenpairs:
    """Return random directions with the true eigenvalues, or the true directions with infinite ones."""
    if config.sketch == "projected-out":
        return replace(true, values=torch.full_like(true.values, INFINITE_CURVATURE))
    generator = torch.Generator(true.vectors.device).manual_seed(seed + CONTROL_STREAM)
    size, rank = true.vectors.shape
    return replace(true, vectors=orthonormalize(random_columns(size, rank, generator, true.vectors.dtype)))


def random_block(params: Sequence[Tensor], columns: int, seed: int) -> Tensor:
    """Draw start vectors in the precision of a sketch."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    generator = torch.Generator(params[0].device).manual_seed(seed)
    return random_columns(sum(p.numel() for p in params), columns, generator, dtype)

"""What a refresh can be made from, and how it becomes an operator on the optimizer's parameters."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from cao.curvature import Hessian, LossFunction, ParameterOperator, Reordered
from cao.linalg import Eigenpairs

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs


def operator_for(source: Source, params: Sequence[Tensor]) -> ParameterOperator:
    """Return the source as an operator on exactly these parameters, in their order."""
    if isinstance(source, Tensor) or not isinstance(source, ParameterOperator):
        return Hessian(source, params)  # type: ignore[arg-type]  # Hessian says what else it cannot take.
    theirs = {id(p) for p in source.params}
    ours = {id(p) for p in params}
    if theirs != ours:
        raise ValueError(
            "the operator must act on exactly the optimizer's trainable parameters; it lacks "
            f"{len(ours - theirs)} of them and has {len(theirs - ours)} others; pass params=[...] when building it"
        )
    is_in_order = all(a is b for a, b in zip(source.params, params, strict=True))
    return source if is_in_order else Reordered(source, params)

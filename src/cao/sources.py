"""What a refresh can be made from, and how it becomes an operator on the optimizer's parameters."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from cao.combinations import in_order
from cao.curvature import Hessian, LossFunction, ParameterOperator
from cao.linalg import Eigenpairs

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs


def operator_for(source: Source, params: Sequence[Tensor]) -> ParameterOperator:
    """Return the source as an operator on exactly these parameters, in their order."""
    if isinstance(source, Tensor) or not isinstance(source, ParameterOperator):
        return Hessian(source, params)  # type: ignore[arg-type]  # Hessian says what else it cannot take.
    return in_order(source, params, "the operator must act on exactly the optimizer's trainable parameters")

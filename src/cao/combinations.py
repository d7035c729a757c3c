"""Operators made of operators: means over parts of a batch or over processes, and another order of parameters."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.curvature import ParameterOperator


class Mean:
    """The mean of operators over the same parameters, such as one for each part of a large batch."""

    def __init__(self, operators: Sequence[ParameterOperator]) -> None:
        if not operators:
            raise ValueError("Mean needs at least one operator, got none")
        self.params = operators[0].params
        self.operators = [
            in_order(operator, self.params, "all operators of a mean must act on the same parameters")
            for operator in operators
        ]

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the mean of the operators' products."""
        total = self.operators[0] @ columns
        for operator in self.operators[1:]:
            total += operator @ columns
        return total.div_(len(self.operators))


class MeanOverRanks:
    """An operator's mean over the processes of a group, each of which holds its own share of the batch."""

    def __init__(self, operator: ParameterOperator, group: dist.ProcessGroup | None) -> None:
        self.operator, self.group, self.params = operator, group, operator.params

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the mean of all ranks' products, the same bits on every rank."""
        rows = (self.operator @ columns).T.contiguous()
        dist.all_reduce(rows, group=self.group)
        return rows.div_(dist.get_world_size(self.group)).T


class Reordered:
    """An operator whose parameters are put into another order."""

    def __init__(self, operator: ParameterOperator, params: Sequence[Tensor]) -> None:
        self.operator, self.params = operator, params

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product in the order of `params`."""
        inner = reorder(columns, self.params, self.operator.params)
        return reorder(self.operator @ inner, self.operator.params, self.params)


def in_order(operator: ParameterOperator, params: Sequence[Tensor], demand: str) -> ParameterOperator:
    """Return the operator on exactly these parameters, in their order; an error begins with the demand."""
    theirs, ours = {id(p) for p in operator.params}, {id(p) for p in params}
    if theirs != ours:
        raise ValueError(
            f"{demand}; it lacks {len(ours - theirs)} of them and has {len(theirs - ours)} others; "
            "pass params=[...] when building it"
        )
    is_in_order = all(a is b for a, b in zip(operator.params, params, strict=True))
    return operator if is_in_order else Reordered(operator, params)


def reorder(columns: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]) -> Float[Tensor, "n k"]:
    """Return the columns with each parameter's rows moved from its old place to its new one."""
    pieces = dict(zip(old, columns.T.split([p.numel() for p in old], dim=1), strict=True))
    return torch.cat([pieces[p] for p in new], dim=1).T

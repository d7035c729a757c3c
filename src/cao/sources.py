"""What a refresh is made from, as one operator on the optimizer's parameters."""

from typing import Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from cao.autograd.isolation import check_not_joining
from cao.curvature import LossFunction, operator_for
from cao.flat import FlatParams
from cao.linalg import Eigenpairs
from cao.operators import AllReduced, ParameterOperator, Scaled, agreed, check_replicas

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs
Group: TypeAlias = dist.ProcessGroup | Literal[False, "lost"] | None
"""Processes that share a curvature: a group, None for all, False for none; a pickle loses its group."""


def shared_operator(
    source: Tensor | LossFunction | ParameterOperator, scale: float, flat: FlatParams, group: Group
) -> ParameterOperator:
    """Return the source, divided by its scale, as an operator on these parameters, averaged over the group."""

    def build() -> ParameterOperator:
        operator = operator_for(source, flat.params)
        return operator if scale == 1 else Scaled(operator, 1 / scale)

    if group is False or not (dist.is_available() and dist.is_initialized()):
        return build()
    if group == "lost":
        raise ValueError("a process group does not travel with a pickle; set optimizer.process_group again")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in process_group; pass the group of its replicas, or False")
    flat.check_group(group)
    check_not_joining(flat.params)
    check_replicas(flat.params, group)
    return AllReduced(agreed(build, group, flat.device), group)

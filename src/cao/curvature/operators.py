"""Symmetric operators known by their products with columns, and operators made of operators."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.linalg.flat import FlatParams, is_spread

Result = TypeVar("Result")
Operator = TypeVar("Operator")


@runtime_checkable
class ParameterOperator(Protocol):
    """A symmetric operator on the flattened and concatenated parameters that it carries."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, in the order of the operator's rows."""
        ...

    def __matmul__(self, columns: Tensor, /) -> Tensor:
        """Return the operator's product with each column."""
        ...


def linearized(operator: Operator) -> Operator:
    """Return the operator at the present parameters, with what its products share done once, if it knows how."""
    linearize = getattr(operator, "linearize", None)
    return operator if linearize is None else linearize()


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
        # A copy, because an operator may keep what it returns.
        total = (self.operators[0] @ columns).clone()
        for operator in self.operators[1:]:
            total += operator @ columns
        return total.div_(len(self.operators))


class Scaled:
    """D^½ A D^½ for a positive diagonal D: one number, which scales A, or one entry per parameter."""

    def __init__(self, operator: ParameterOperator, diagonal: float | Float[Tensor, " n"]) -> None:
        self.operator, self.params = operator, operator.params
        self.diagonal = diagonal

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return D^½ (A (D^½ columns))."""
        if not isinstance(self.diagonal, Tensor):
            return self.diagonal * (self.operator @ columns)
        root = self.diagonal.to(columns).sqrt().unsqueeze(1)
        return root * (self.operator @ (root * columns))


class Shifted:
    """A + Ω for a diagonal Ω: one number, or one entry per parameter."""

    def __init__(self, operator: ParameterOperator, diagonal: float | Float[Tensor, " n"]) -> None:
        self.operator, self.params = operator, operator.params
        self.diagonal = diagonal

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return A columns + Ω columns."""
        shift = self.diagonal.to(columns).unsqueeze(1) if isinstance(self.diagonal, Tensor) else self.diagonal
        return self.operator @ columns + shift * columns


class AllReduced:
    """An operator's mean over the processes of a group, each of which holds its own share of the batch."""

    def __init__(self, operator: ParameterOperator, group: dist.ProcessGroup | None) -> None:
        self.operator, self.group, self.params = operator, group, operator.params
        self.flat = FlatParams(operator.params)

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the mean of all ranks' products, the same bits on every rank."""
        product = agreed(lambda: self.operator @ columns, self.group, columns.device)
        rows = product.T.contiguous()
        self.flat.average(rows, self.group)
        return rows.T


def agreed(compute: Callable[[], Result], group: dist.ProcessGroup | None, device: torch.device) -> Result:
    """Return what this rank computes if every rank could, or raise on all of them, so that none waits for ever."""
    result, error = None, None
    try:
        result = compute()
    except Exception as caught:
        error = caught
    failures = torch.tensor(float(error is not None), device=device)
    dist.all_reduce(failures, group=group)
    if error is not None:
        raise error
    if failures > 0:
        raise RuntimeError(
            f"this failed in {int(failures)} other process(es), which report the reason, and was abandoned here"
        )
    return result  # type: ignore[return-value]


def check_replicas(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Refuse, in every process, to share a curvature between models whose parameters differ.

    They are compared by their sizes and by their sums, to rounding: processes may run on different machines.
    """
    # Shards differ by nature; what is compared of them is their number.
    sums = [p.detach().sum(dtype=torch.float64) for p in params if not is_spread(p)] or [torch.zeros(()).double()]
    facts = torch.stack([torch.stack(sums).sum(), sums[0], torch.tensor(sum(p.numel() for p in params)).to(sums[0])])
    lowest, highest = facts.clone(), facts.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    if not torch.allclose(lowest, highest, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise ValueError(
            "the parameters differ between the processes of the group, which cannot share one curvature; pass "
            "process_group=False if each trains a model, or a part of one, of its own"
        )


class Reordered:
    """An operator whose parameters are put into another order."""

    def __init__(self, operator: ParameterOperator, params: Sequence[Tensor]) -> None:
        self.operator, self.params = operator, params
        self._inner, self._outer = FlatParams(operator.params), FlatParams(params)

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product in the order of `params`."""
        inner = self._outer.reorder(columns, self._inner)
        return self._inner.reorder(self.operator @ inner, self._outer)


def in_order(operator: ParameterOperator, params: Sequence[Tensor], demand: str) -> ParameterOperator:
    """Return the operator on exactly these parameters, in their order; an error begins with the demand."""
    theirs, ours = {id(p) for p in operator.params}, {id(p) for p in params}
    if len(theirs) < len(operator.params):
        raise ValueError(f"{demand}; it has {len(operator.params) - len(theirs)} of them twice: list each one once")
    if theirs != ours:
        raise ValueError(
            f"{demand}; it lacks {len(ours - theirs)} of them and has {len(theirs - ours)} others; "
            "pass params=[...] when building it"
        )
    is_in_order = all(a is b for a, b in zip(operator.params, params, strict=True))
    if is_in_order:
        return operator
    reordered = getattr(operator, "reordered", None)
    return reordered(params) if reordered else Reordered(operator, params)

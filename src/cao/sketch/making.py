"""How a sketch is made and adopted, from whatever source, looked at in use, and held against a step's gradient."""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao import advice
from cao.autograd.isolation import check_not_joining
from cao.curvature.hessian import Hessian, LossFunction, operator_for
from cao.curvature.operators import AllReduced, ParameterOperator, agreed, check_replicas
from cao.linalg.columns import Eigenpairs, generator_for, inner_products, precise
from cao.linalg.eigensolvers import eigensolver_for, solved
from cao.linalg.flat import FlatParams, space_of, storage_order
from cao.rules.refresh import Look
from cao.rules.rules import Rules
from cao.sketch.damped import is_singular
from cao.sketch.sketch import Progress, Sketch

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs
Group: TypeAlias = dist.ProcessGroup | Literal[False, "lost"] | None
"""Processes that share a curvature: a group, None for all, False for none; a pickle loses its group."""
State: TypeAlias = Mapping[Tensor, dict[str, Any]]

# Beyond this relative asymmetry a "Hessian" is no Hessian; bfloat16 alone leaves about 0.01.
ASYMMETRIC = 0.05
# Gradients of one loss agree in direction to more than this cosine; a factor within these bounds is not told of, and
# one so near to 1 is 1.
PARALLEL, SMALLEST, LARGEST, SAME = 0.9999, 0.5, 2.0, 0.01


def check_request(scale: float | Tensor, params: FlatParams, rank: object) -> None:
    """Refuse a refresh of a loss with an impossible scale, or for fewer parameters than it is to find directions."""
    if not (isinstance(scale, Real | Tensor) and 0 < float(scale) < math.inf):
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    if not params.params:
        raise ValueError("all parameters are frozen: there is no curvature where no parameter has requires_grad=True")
    if params.size == 0:
        raise ValueError("all parameters that require a gradient are empty: there is no curvature without numbers")
    if isinstance(rank, int) and rank > params.size:
        raise ValueError(f"rank must not exceed the number of trainable parameters, got rank {rank} for {params.size}")


def shared_operator(
    source: Tensor | LossFunction | ParameterOperator, scale: float, flat: FlatParams, group: Group
) -> ParameterOperator:
    """Return the source, divided by its scale, as an operator on these parameters, averaged over the group."""
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return operator_for(source, flat.params, scale)
    if group == "lost":
        raise ValueError("a process group does not travel with a pickle; set optimizer.process_group again")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in process_group; pass the group of its replicas, or False")
    flat.check_group(group)
    check_not_joining(flat.params)
    return AllReduced(agreed(lambda: operator_for(source, flat.params, scale), group, flat.device), group)


def found_pairs(operator: ParameterOperator, rules: Rules) -> Eigenpairs:
    """Return new eigenpairs of the operator, started from the last ones; the first time, test its symmetry."""
    if isinstance(operator, AllReduced):
        # Here and not at each look: it takes a pass over all parameters.
        check_replicas(operator.params, operator.group)
    storage, settings, progress = FlatParams(operator.params), rules.settings, rules.progress
    columns = min(rules.rank.columns(progress.captured), storage.size)
    if settings.eigensolver is None:
        solve = rules.rank.solver(columns, rules.damping.need(rules.pace), settings.power_iterations)
    else:
        solve = eigensolver_for(settings.eigensolver, settings.power_iterations)
    # Start columns depend on the seed and the number of the refresh.
    generator = generator_for(storage.device, int(settings.seed), progress.attempts)
    if settings.warm_start and progress.sketch is not None:
        start = progress.sketch.start(storage, columns, generator)
    else:
        start = storage.space.random(storage.size, columns, generator, storage.dtype)
    if progress.attempts:
        return solved(solve, operator, start, storage.space)
    probe = SymmetryProbe(operator)
    pairs = solved(solve, probe, start, storage.space)
    if (asymmetry := probe.asymmetry) > ASYMMETRIC:
        advice.warn_once("asymmetry", advice.asymmetric(asymmetry), progress.has_warned)
    if storage.space.mesh is None and isinstance(operator, Hessian) and operator.gradient is not None:
        # `check_scale` holds the next step's gradient against it.
        parts = zip(operator.params, operator.gradient, strict=True)
        progress.source_gradient = [(param, part.detach()) for param, part in parts if part is not None]
    return pairs


class SymmetryProbe:
    """An operator that watches, in its own products, whether it is symmetric: vᵀ(Aw) against wᵀ(Av).

    It keeps the first column v that it multiplies, and Av, and compares them with every later column w. That costs two
    vectors and no product.
    """

    def __init__(self, operator: ParameterOperator) -> None:
        self.operator, self.params, self.space = operator, operator.params, space_of(operator.params)
        self._first: tuple[Tensor, Tensor] | None = None
        self._seen: list[Float[Tensor, "2 k"]] = []

    @torch.no_grad()
    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the operator's product, having compared."""
        with torch.enable_grad():
            image = self.operator @ columns
        if self._first is None:
            self._first = columns[:, 0].clone(), image[:, 0].clone()
        column, its_image = self._first
        self._seen.append(self.space.total(torch.stack([its_image @ columns, column @ image])))
        return image

    @property
    def asymmetry(self) -> float:
        """The largest difference seen, relative to the largest product; 0 for a symmetric operator."""
        ours, theirs = torch.cat(self._seen, dim=1).cpu().double()
        return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def given_pairs(pairs: Eigenpairs, scale: float, params: FlatParams, rank: object) -> Eigenpairs:
    """Return ready eigenpairs over the parameters in storage order, checked."""
    storage = FlatParams(storage_order(params.params))
    check_eigenpairs(pairs, params, rank if isinstance(rank, int) else len(pairs.values))
    vectors = params.reorder(params.scaled(pairs.vectors.detach(), 1), storage).to(storage.device, storage.dtype)
    return replace(pairs, values=pairs.values / scale, residuals=pairs.residuals / abs(scale), vectors=vectors)


def check_eigenpairs(pairs: Eigenpairs, params: FlatParams, rank: int) -> None:
    """Refuse ready eigenpairs of other shapes, or with vectors that are not orthonormal; let non-finite ones pass."""
    for name, wanted in (("vectors", (params.length, rank)), ("values", (rank,)), ("residuals", (rank,))):
        got = tuple(getattr(pairs, name).shape)
        if got != wanted:
            raise ValueError(f"Eigenpairs must have {name} of shape {wanted}, got {got}")
    vectors = params.scaled(pairs.vectors, 1)
    gram = inner_products(vectors, vectors, space=params.space)
    error = float((gram - torch.eye(rank).to(gram.device)).abs().max())
    if error > 1e-3:
        raise ValueError(
            f"Eigenpairs must have orthonormal vectors, got VᵀV off by {error:.2g}; torch.linalg.qr makes them so"
        )


def adopt(pairs: Eigenpairs, params: FlatParams, rules: Rules) -> None:
    """Make eigenpairs the sketch in use: capture what is to be captured, measure the damping, count, and warn."""
    # A few numbers, which are then asked often.
    pairs = sharpest_first(replace(pairs, values=pairs.values.cpu(), residuals=pairs.residuals.cpu()), rules)
    progress, values = rules.progress, pairs.values.double()
    # The curvature that weight decay adds everywhere.
    decay = max(group["weight_decay"] for group in rules.groups)
    captured = rules.rank.captured(rules.curvatures(values.tolist()), rules.damping.need(rules.pace))
    progress.damping = rules.damping.at_refresh(progress.damping, pairs, captured, params.size, decay)
    progress.refreshes += 1
    progress.captured = captured
    # The sharpest direction is watched, even if nothing is done about it.
    kept = max(captured, 1)
    residuals, rows = pairs.residuals[:kept].tolist(), pairs.vectors[:, :kept].T
    # A copy of a part, or the rest would live on with it.
    rows = rows.contiguous() if kept == len(pairs.values) else rows.clone(memory_format=torch.contiguous_format)
    eta, _ = rules.eta_and_brake()
    sketch = Sketch(values[:kept].tolist(), residuals, eta, progress.steps, params, rows)
    progress.turned = turned_between(progress.sketch, sketch) if progress.sketch else 0.0
    progress.sketch = sketch
    progress.indefinite_refreshes += int((values + eta < 0).any())
    if rules.settings.negative_curvature == "signed":
        progress.singular_directions += int(is_singular(values, eta).sum())
    rules.check_edge(values.tolist(), captured, params.size)


def sharpest_first(pairs: Eigenpairs, rules: Rules) -> Eigenpairs:
    """Return the pairs ordered by what the preconditioner makes of their eigenvalues, the largest first."""
    curvatures = rules.curvatures(pairs.values.tolist())
    order = sorted(range(len(curvatures)), key=lambda index: -curvatures[index])
    if order == list(range(len(order))):
        return pairs
    values, vectors, residuals = pairs.values[order], pairs.vectors[:, order], pairs.residuals[order]
    return replace(pairs, values=values, vectors=vectors, residuals=residuals)


def turned_between(old: Sketch, new: Sketch) -> float:
    """Return the share of a sketch that lies outside the one before it: 1 − ‖V_oldᵀV_new‖²/k."""
    if old.rows.shape[1] != new.rows.shape[1]:
        return 0.0
    shared = float(inner_products(old.rows.T, new.rows.T, space=new.params.space).square().sum()) / len(new.rows)
    return min(max(1 - shared, 0.0), 1.0)


def is_stale(operator: ParameterOperator, sketch: Sketch, rules: Rules, state: State) -> bool:
    """Whether the rule for refreshes, having looked if it wants to, asks for one."""
    progress, looks = rules.progress, list[Look]()
    if [id(p) for p in operator.params] != [id(p) for p in sketch.storage.params]:
        return True

    def look() -> Look:
        progress.looks += 1
        drift, change, along = curvature_seen(operator, sketch, rules, last_step(operator, state))
        sharpest = max(sketch.values[0] * (1 + change), along)
        is_needed = progress.captured == 0 and rules.rank.captured([sharpest], rules.damping.need(rules.pace)) > 0
        looks.append(Look(drift, change, along > rules.pace.edge * rules.eta_and_brake()[0], is_needed))
        return looks[-1]

    is_refresh_wanted, progress.seen = rules.refresh.wants_refresh(progress.seen, progress, look)
    if all(seen.is_finite for seen in looks):
        progress.looked_at = progress.steps
    return is_refresh_wanted


def last_step(operator: ParameterOperator, state: State) -> Tensor | None:
    """Return the direction of the last step in the coordinates of the sketch, as far as momentum keeps it."""
    storage, name = FlatParams(operator.params), "momentum_buffer"
    if not any(name in state[param] for param in storage.params):
        return None
    return storage.join([state[p].get(name, torch.zeros_like(p)) for p in storage.params])


def curvature_seen(
    operator: ParameterOperator, sketch: Sketch, rules: Rules, last_step: Tensor | None
) -> tuple[float, float, float]:
    """Return the sketch's drift ‖Hq − Bq‖/‖Bq‖, its change qᵀHq/qᵀBq − 1, and the curvature along the last step.

    q is a random mix of the captured vectors. Of the last step only the part outside the sketch counts; without one,
    its curvature is 0.
    """
    progress, seed = rules.progress, int(rules.settings.seed)
    storage = FlatParams(operator.params)
    space, generator = storage.space, generator_for(storage.device, seed, progress.attempts, progress.steps)
    rows, values = sketch.rows, torch.tensor(sketch.values, dtype=torch.float64).to(sketch.rows)
    mix = torch.randn(len(rows), generator=generator, device=rows.device, dtype=rows.dtype)
    mix /= mix.norm()
    columns = [mix @ rows]
    if last_step is not None:
        outside = last_step - space.total(rows @ last_step) @ rows
        length = space.norms(outside.unsqueeze(1))
        if bool(length > 0):
            columns.append(outside / length)
    image = (operator @ torch.stack(columns).T).detach().T
    expected = (values * mix) @ rows
    off, length = space.norms(torch.stack([image[0] - expected, expected]).T)
    products = [columns[0] @ image[0], columns[0] @ expected, columns[-1] @ image[-1]]
    seen, known, last = space.total(torch.stack(products))
    # Where there was no curvature, nothing can be told relative to it.
    drift, change = off / torch.where(length == 0, 1, length), torch.where(known == 0, 0, seen / known - 1)
    along = last if len(columns) > 1 else torch.zeros_like(last)
    progress.count(len(columns))
    numbers: list[float] = torch.stack([drift, change, along]).tolist()
    return numbers[0], numbers[1], numbers[2]


class Compared(NamedTuple):
    """How gradients differ from those that a refresh saw."""

    factor: float
    norm: float
    is_parallel: bool


def compared(known: list[tuple[Tensor, Tensor]]) -> Compared | None:
    """Compare the gradients that parameters have now with known ones; None where there is nothing to compare."""
    pairs = [(param.grad, part) for param, part in known if param.grad is not None]
    if not pairs:
        return None
    best = precise(pairs[0][0].device)
    parts = [torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]).to(best) for a, b in pairs]
    product, ours, theirs = torch.stack(parts).sum(dim=0).tolist()
    if not (ours > 0 and theirs > 0 and math.isfinite(factor := math.sqrt(ours / theirs))):
        return None
    return Compared(factor, math.sqrt(ours), product > PARALLEL * math.sqrt(ours) * math.sqrt(theirs))


def note_part(progress: Progress) -> None:
    """Count a loss that comes in the step of the first refresh, where that one's gradient is kept to be added to.

    The second one waits for the device, to see whether what is kept is that very gradient.
    """
    if progress.parts > 1 and progress.source_gradient:
        progress.parts += 1
    elif (seen := compared(progress.source_gradient)) and seen.is_parallel and abs(seen.factor - 1) < SAME:
        progress.parts = 2


def check_scale(progress: Progress) -> None:
    """Warn, at the step after the first refresh, if its gradient is a multiple of the one that the refresh saw.

    Gradients of n parts of a batch, added up, are √n times as long as one of them if they point anywhere, and n times
    if they agree; their mean is as long at most. That step waits for the device, and no other one does.
    """
    seen, count = compared(progress.source_gradient), progress.parts
    progress.source_gradient, progress.parts = [], 1
    if seen and count > 1 and seen.factor > count**0.25:
        advice.warn_once("scale", advice.accumulated(count, seen.factor), progress.has_warned)
    elif seen and seen.is_parallel and not SMALLEST < seen.factor < LARGEST:
        advice.warn_once("scale", advice.scaled(seen.factor, seen.norm), progress.has_warned)

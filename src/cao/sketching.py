"""How a new sketch is made and adopted, from whatever source, and how one in use is looked at."""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from cao import advice
from cao.autograd.isolation import check_not_joining
from cao.curvature import LossFunction, operator_for
from cao.eigensolvers import eigensolver_for
from cao.flat import FlatParams
from cao.linalg import Eigenpairs, generator_for, inner_products, norms, random_columns, total
from cao.operators import AllReduced, ParameterOperator, SymmetryProbe, agreed, check_replicas
from cao.policies.refresh import Look
from cao.preconditioner import is_singular
from cao.rules import Rules
from cao.sketch import Sketch

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs
Group: TypeAlias = dist.ProcessGroup | Literal[False, "lost"] | None
"""Processes that share a curvature: a group, None for all, False for none; a pickle loses its group."""
State: TypeAlias = Mapping[Tensor, dict[str, Any]]

# A curvature that changes by so much from one batch to the next is that of one batch.
FLEETING = -0.5
# Beyond this relative asymmetry a "Hessian" is no Hessian; bfloat16 alone leaves about 0.01.
ASYMMETRIC = 0.05


def check_request(scale: float | Tensor, params: FlatParams, rank: object) -> None:
    """Refuse a refresh of a loss with an impossible scale, or for fewer parameters than it is to find directions."""
    if not (isinstance(scale, Real | Tensor) and 0 < float(scale) < math.inf):
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    if params.size == 0:
        raise ValueError("all parameters are frozen: there is no curvature where no parameter has requires_grad=True")
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
    check_replicas(flat.params, group)
    return AllReduced(agreed(lambda: operator_for(source, flat.params, scale), group, flat.device), group)


def found_pairs(operator: ParameterOperator, rules: Rules) -> Eigenpairs:
    """Return new eigenpairs of the operator, started from the last ones; the first time, test its symmetry."""
    storage, settings, progress = FlatParams(operator.params), rules.settings, rules.progress
    columns = min(rules.rank.columns(progress.captured), storage.size)
    iterations, tolerance = settings["power_iterations"], settings["tolerance"]
    if settings["eigensolver"] is None:
        solve = rules.rank.solver(columns, rules.damping.need(rules.pace), iterations, tolerance)
    else:
        solve = eigensolver_for(settings["eigensolver"], iterations, tolerance)
    # Start columns depend on the seed and the number of the refresh.
    generator = generator_for(storage.device, int(settings["seed"]), progress.attempts)
    if settings["warm_start"] and progress.sketch is not None:
        start = progress.sketch.start(storage, columns, generator)
    else:
        start = random_columns(storage.size, columns, generator, storage.dtype)
    if not settings["keep_sketch"]:
        progress.drop_sketch()
    if progress.attempts:
        return solve(operator, start, overwrite_start=True)
    probe = SymmetryProbe(operator)
    pairs = solve(probe, start, overwrite_start=True)
    if (asymmetry := probe.asymmetry) > ASYMMETRIC:
        advice.warn_once("asymmetry", advice.asymmetric(asymmetry), progress.has_warned)
    return pairs


def given_pairs(pairs: Eigenpairs, scale: float, params: FlatParams, rank: object) -> Eigenpairs:
    """Return ready eigenpairs over the parameters in storage order, checked."""
    storage = FlatParams.in_storage_order(params.params)
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
    error = float((inner_products(vectors, vectors) - torch.eye(rank).to(vectors.device)).abs().max())
    if error > 1e-3:
        raise ValueError(
            f"Eigenpairs must have orthonormal vectors, got VᵀV off by {error:.2g}; torch.linalg.qr makes them so"
        )


def adopt(pairs: Eigenpairs, operator: ParameterOperator | None, params: FlatParams, rules: Rules) -> None:
    """Make eigenpairs the sketch in use: capture what is to be captured, measure the damping, count, and warn."""
    progress, values = rules.progress, pairs.values.double().cpu()
    # The curvature that weight decay adds everywhere.
    decay = max(0.0 if group["decoupled_weight_decay"] else group["weight_decay"] for group in rules.groups)
    captured = rules.rank.captured(values.tolist(), rules.damping.need(rules.pace))
    measured, products = rules.damping.at_refresh(pairs, captured, operator, decay)
    if measured is not None:
        progress.damping = measured
    progress.count(products)
    progress.refreshes += 1
    progress.captured, progress.is_noise = captured, False
    # The sharpest direction is watched, even if nothing is done about it.
    kept = max(captured, 1)
    residuals, rows = pairs.residuals[:kept].tolist(), pairs.vectors[:, :kept].T.contiguous()
    sketch = Sketch(values[:kept].tolist(), residuals, rules.eta(), progress.steps, params, rows)
    progress.turned = turned_between(progress.sketch, sketch)
    progress.sketch = sketch
    progress.indefinite_refreshes += int((values + rules.eta() < 0).any())
    if rules.settings["negative_curvature"] == "signed":
        progress.singular_directions += int(is_singular(values, rules.eta()).sum())
    rules.check_edge(values, captured, params.size)


def turned_between(old: Sketch | None, new: Sketch) -> float:
    """Return the share of a sketch that lies outside the one before it: 1 − ‖V_oldᵀV_new‖²/k, 0 without one."""
    if old is None or old.rows.shape[1] != new.rows.shape[1]:
        return 0.0
    shared = float(inner_products(old.rows.T, new.rows.T).square().sum()) / len(new.rows)
    return min(max(1 - shared, 0.0), 1.0)


def is_stale(operator: ParameterOperator, sketch: Sketch, rules: Rules, state: State) -> bool:
    """Whether the rule for refreshes, having looked if it wants to, asks for one."""
    progress = rules.progress

    def look() -> Look:
        progress.looks += 1
        drift, change, along = curvature_seen(operator, sketch, rules, last_step(operator, rules, state))
        sharpest = max(sketch.values[0] * (1 + change), along)
        is_needed = progress.captured == 0 and rules.rank.captured([sharpest], rules.damping.need(rules.pace)) > 0
        is_fleeting = rules.settings["metric"] is not None and change < FLEETING
        return Look(drift, change, along > rules.pace.edge * rules.eta(), is_needed, is_fleeting)

    is_refresh_wanted = rules.refresh.wants_refresh(progress, look)
    progress.looked_at = progress.steps
    return is_refresh_wanted


def last_step(operator: ParameterOperator, rules: Rules, state: State) -> Tensor | None:
    """Return the direction of the last step in the coordinates of the sketch, as far as momentum keeps it."""
    storage, metric = FlatParams(operator.params), rules.settings["metric"]
    name = "momentum_buffer" if metric is None else "exp_avg"
    if not any(name in state[param] for param in storage.params):
        return None
    direction = storage.join([state[p].get(name, torch.zeros_like(p)) for p in storage.params])
    return direction if metric is None else direction * metric.diagonal(storage, state).sqrt()


def curvature_seen(
    operator: ParameterOperator, sketch: Sketch, rules: Rules, last_step: Tensor | None
) -> tuple[float, float, float]:
    """Return the sketch's drift ‖Hq − Bq‖/‖Bq‖, its change qᵀHq/qᵀBq − 1, and the curvature along the last step.

    q is a random mix of the captured vectors. Of the last step only the part outside the sketch counts; without one,
    its curvature is 0. A sketch of other parameters has drifted without bound.
    """
    progress, seed = rules.progress, int(rules.settings["seed"])
    storage = FlatParams(operator.params)
    if any(a is not b for a, b in zip(storage.params, sketch.storage.params, strict=False)):
        return torch.inf, torch.inf, 0.0
    generator = generator_for(storage.device, seed, progress.attempts, progress.steps)
    rows, values = sketch.rows, torch.tensor(sketch.values, dtype=torch.float64).to(sketch.rows)
    mix = torch.randn(len(rows), generator=generator, device=rows.device, dtype=rows.dtype)
    mix /= mix.norm()
    columns = [mix @ rows]
    if last_step is not None:
        outside = last_step - total(rows @ last_step) @ rows
        length = norms(outside.unsqueeze(1))
        if bool(length > 0):
            columns.append(outside / length)
    image = (operator @ torch.stack(columns).T).detach().T
    expected = (values * mix) @ rows
    off, length = norms(torch.stack([image[0] - expected, expected]).T)
    seen, known, last = total(torch.stack([columns[0] @ image[0], columns[0] @ expected, columns[-1] @ image[-1]]))
    drift, change, along = off / length, seen / known - 1, last if len(columns) > 1 else torch.zeros_like(last)
    progress.count(len(columns))
    numbers: list[float] = torch.stack([drift, change, along]).tolist()
    return numbers[0], numbers[1], numbers[2]

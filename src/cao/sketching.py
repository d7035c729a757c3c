"""How a new sketch is made, and how one in use is looked at: start columns, eigensolver, drift."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cao import advice
from cao.flat import FlatParams
from cao.linalg import Eigenpairs, generator_for, inner_products, random_columns
from cao.operators import ParameterOperator, SymmetryProbe
from cao.policies.refresh import Look
from cao.policies.shorthands import eigensolver_for
from cao.preconditioner import is_singular
from cao.rules import Rules
from cao.sketch import Progress, Sketch

Settings = Mapping[str, Any]


def found_pairs(operator: ParameterOperator, rules: Rules) -> Eigenpairs:
    """Return new eigenpairs of the operator, started from the last ones; the first time, test its symmetry."""
    settings, progress, rank = rules.settings, rules.progress, rules.rank
    storage = FlatParams(operator.params)
    columns = min(rank.columns(progress.captured), storage.size)
    iterations, tolerance = settings["power_iterations"], settings["tolerance"]
    if settings["eigensolver"] is None:
        solve = rank.solver(columns, rules.damping.need(rules.pace), iterations, tolerance)
    else:
        solve = eigensolver_for(settings["eigensolver"], iterations, tolerance)
    probe = SymmetryProbe(operator)
    # No name for the start columns: the solver overwrites them, and may drop them.
    start = [start_columns(storage, columns, settings, progress)]
    pairs = solve(operator if progress.attempts else probe, start.pop(), overwrite_start=True)
    if progress.attempts == 0:
        advice.warn_once("asymmetry", advice.on_asymmetry(probe.asymmetry), progress.has_warned)
    return pairs


def start_columns(storage: FlatParams, columns: int, settings: Settings, progress: Progress) -> Tensor:
    """Return the last subspace, or random columns, drawn from the seed and the number of the refresh."""
    generator = generator_for(storage.device, int(settings["seed"]), progress.attempts)
    if settings["warm_start"] and progress.sketch is not None:
        return progress.sketch.start(storage, columns, generator)
    return random_columns(storage.size, columns, generator, storage.dtype)


def given_pairs(pairs: Eigenpairs, scale: float, params: FlatParams, settings: Settings) -> Eigenpairs:
    """Return ready eigenpairs over the parameters in storage order, checked."""
    rank, storage = settings["rank"], FlatParams.in_storage_order(params.params)
    check_eigenpairs(pairs, params.size, rank if isinstance(rank, int) else len(pairs.values))
    vectors = params.reorder(pairs.vectors.detach(), storage).to(storage.device, storage.dtype)
    return replace(pairs, values=pairs.values / scale, residuals=pairs.residuals / abs(scale), vectors=vectors)


def check_eigenpairs(pairs: Eigenpairs, size: int, rank: int) -> None:
    """Refuse ready eigenpairs of other shapes, or with vectors that are not orthonormal; let non-finite ones pass."""
    for name, wanted in (("vectors", (size, rank)), ("values", (rank,)), ("residuals", (rank,))):
        got = tuple(getattr(pairs, name).shape)
        if got != wanted:
            raise ValueError(f"Eigenpairs must have {name} of shape {wanted}, got {got}")
    error = float((inner_products(pairs.vectors, pairs.vectors) - torch.eye(rank).to(pairs.vectors.device)).abs().max())
    if error > 1e-3:
        raise ValueError(
            f"Eigenpairs must have orthonormal vectors, got VᵀV off by {error:.2g}; torch.linalg.qr makes them so"
        )


def adopt(pairs: Eigenpairs, operator: ParameterOperator | None, params: FlatParams, rules: Rules) -> None:
    """Make eigenpairs the sketch in use: capture what is to be captured, measure the damping, count, and warn."""
    progress, values = rules.progress, pairs.values.double().cpu()
    captured = rules.rank.captured(values.tolist(), rules.damping.need(rules.pace))
    measured, products = rules.damping.at_refresh(pairs, captured, operator, rules.weight_decay)
    if measured is not None:
        progress.damping = measured
    progress.count(products)
    progress.refreshes += 1
    progress.captured = captured
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


def is_stale(operator: ParameterOperator, last_step: Tensor | None, rules: Rules) -> bool:
    """Whether the rule for refreshes, having looked if it wants to, asks for one."""
    progress, sketch = rules.progress, rules.progress.sketch
    if sketch is None:
        return True

    def look() -> Look:
        progress.looks += 1
        drift, change, along = curvature_seen(operator, sketch, rules.settings, progress, last_step)
        sharpest = max(sketch.values[0] * (1 + change), along)
        is_needed = progress.captured == 0 and rules.rank.captured([sharpest], rules.damping.need(rules.pace)) > 0
        return Look(drift, change, along > rules.pace.edge * rules.eta(), is_needed)

    is_refresh_wanted = rules.refresh.wants_refresh(progress, look)
    progress.looked_at = progress.steps
    return is_refresh_wanted


def curvature_seen(
    operator: ParameterOperator, sketch: Sketch, settings: Settings, progress: Progress, last_step: Tensor | None
) -> tuple[float, float, float]:
    """Return the sketch's drift ‖Hq − Bq‖/‖Bq‖, its change qᵀHq/qᵀBq − 1, and the curvature along the last step.

    q is a random mix of the captured vectors. Of the last step only the part outside the sketch counts; without one,
    its curvature is 0. A sketch of other parameters has drifted without bound.
    """
    storage = FlatParams(operator.params)
    if any(a is not b for a, b in zip(storage.params, sketch.storage.params, strict=False)):
        return torch.inf, torch.inf, 0.0
    generator = generator_for(storage.device, int(settings["seed"]), progress.attempts, progress.steps)
    rows, values = sketch.rows, torch.tensor(sketch.values, dtype=torch.float64).to(sketch.rows)
    mix = torch.randn(len(rows), generator=generator, device=rows.device, dtype=rows.dtype)
    mix /= mix.norm()
    columns = [mix @ rows]
    if last_step is not None:
        outside = last_step - (rows @ last_step) @ rows
        if bool(outside.norm() > 0):
            columns.append(outside / outside.norm())
    image = (operator @ torch.stack(columns).T).detach().T
    expected = (values * mix) @ rows
    drift = (image[0] - expected).norm() / expected.norm()
    change = (columns[0] @ image[0]) / (columns[0] @ expected) - 1
    along = columns[-1] @ image[-1] if len(columns) > 1 else torch.zeros_like(change)
    progress.count(len(columns))
    numbers: list[float] = torch.stack([drift, change, along]).tolist()
    return numbers[0], numbers[1], numbers[2]

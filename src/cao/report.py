"""What an optimizer did, what it cost and what it advises, as a short table."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import dtype, float64

from cao import advice
from cao.prices import HESSIAN_PRODUCT
from cao.quasi_newton.progress import Status
from cao.rules.damping import AtTheEdge
from cao.rules.rank import ByNeed
from cao.rules.refresh import Every, Seen
from cao.rules.rules import Rules

MEMORIES = {"pairs": "pairs over the sketch", "dense": "a dense matrix, in place of sketch and pairs"}

# Points are overfitted where the held-out mean square is so many times the fitted one.
OVERFITTED = 2.0

# Beyond this share of a subspace outside the last one, or of an eigenvalue as its residual, a sketch is a poor guide.
TOO_MUCH = 0.5


@dataclass(frozen=True)
class Report:
    """A title, rows of a name and a text, and advice; `print` shows it as a table."""

    title: str
    rows: dict[str, str]
    advice: list[str]

    def __str__(self) -> str:
        """Return the table."""
        width = max(map(len, self.rows))
        lines = [self.title, *(f"  {name:{width}}  {text}" for name, text in self.rows.items())]
        return "\n".join([*lines, *(f"  → {text}" for text in self.advice or ["nothing to advise"])])

    __repr__ = __str__


def report_on_cao(rules: Rules) -> Report:
    """Report on a CAO: steps, refreshes, sketch, how far the rate is from the edge of stability, cost, advice."""
    progress, counters = rules.progress, rules.progress.counters
    if rules.pace.rate == 0 and progress.largest_rate > 0:
        # A schedule has ended: what its rate was held against is told of the largest.
        rules = Rules([{**group, "lr": progress.largest_rate} for group in rules.groups], progress)
    title = f"CAO after {counters.steps:,} steps"
    cost = (
        f"{counters.hessian_products:,} Hessian products, about {gradients_per_step(rules):.2g} gradients per step "
        f"(at {HESSIAN_PRODUCT:g} gradients per product, both of the batch that a refresh is given); "
        f"{progress.seconds:.2g} s"
    )
    refreshes = f"{counters.refreshes:,}, and {counters.looks:,} looks in between"
    if progress.sketch is None:
        return Report(title, {"refreshes": refreshes, "cost": cost}, list(advice_without_sketch(rules)))
    values = ", ".join(f"{value:.3g}" for value in progress.sketch.values)
    plain, strain, edge = strains(rules)
    found = "no positive curvature was found"
    if rules.curvatures(progress.sketch.values)[0] > 0:
        found = f"{name_of_rate(rules)}·λ₁ = {plain:.3g} without the sketch, at most {strain:.3g} with it"
    in_use = f"rank {progress.captured}" if progress.captured else "none in use, the sharpest direction in view"
    rows = {
        "refreshes": f"{refreshes}; the last one at step {progress.sketch.step:,}",
        "sketch": f"{in_use}, λ = {values}",
        "damping": f"η = {rules.eta_and_brake()[0]:.3g}",
        "stability": f"{found}; the edge of stability is {edge:.3g}",
        "cost": cost,
    }
    return Report(title, rows, list(advice_on_sketch(rules)))


def name_of_rate(rules: Rules) -> str:
    """Return what a direction outside the sketch moves by, as a user knows it."""
    return "lr" if rules.settings.scaling == "unit" else "(lr/η)"


def gradients_per_step(rules: Rules) -> float:
    """Return what curvature has cost, in gradients, per step."""
    return HESSIAN_PRODUCT * rules.progress.hessian_products / max(rules.progress.steps, 1)


def strains(rules: Rules) -> tuple[float, float, float]:
    """Return rate · λ₁ of a plain step, the largest rate · λ of the step that is taken, and the edge of stability."""
    progress = rules.progress
    assert progress.sketch is not None
    values = rules.curvatures(progress.sketch.values)
    has_measured = isinstance(rules.damping, AtTheEdge) and isinstance(progress.damping, float)
    most = progress.damping if has_measured else math.inf
    *strains, edge = rules.strains(progress.sketch.values, progress.captured, progress.sketch.params.size, most)
    is_scaled = rules.settings.scaling == "inverse-damping"
    unscaled = rules.pace.rate * (rules.damped().base if is_scaled else 1.0)
    return unscaled * values[0], max(strains), edge


def advice_without_sketch(rules: Rules) -> Iterator[str]:
    """Say why there is no sketch, and what to do."""
    if rules.settings.rank == 0:
        yield "rank is 0: these are first-order steps"
    elif failed := rules.progress.failed_refreshes:
        which = f"{failed} of" if rules.progress.refreshes else "all"
        yield f"{which} {rules.progress.attempts} refreshes were non-finite: is the loss finite, its scale right?"
    else:
        yield "no sketch: call optimizer.refresh_if_due(loss) before loss.backward(), in every iteration"


def advice_on_sketch(rules: Rules) -> Iterator[str]:
    """Say what is wrong, if anything is, each with its figure and a remedy."""
    yield from advice_on_rate(rules)
    yield from advice_on_freshness(rules)
    progress = rules.progress
    if progress.failed_refreshes:
        yield f"{progress.failed_refreshes} of {progress.attempts} refreshes were non-finite and discarded"
    if bad := int(progress.non_finite_steps):
        yield f"{bad} of {progress.steps} gradients were not finite, and those steps were taken without the sketch"
    if rules.settings.negative_curvature == "signed" and progress.indefinite_refreshes:
        yield (
            f"P was indefinite after {progress.indefinite_refreshes} of {progress.refreshes} refreshes, and steps may "
            'climb: use negative_curvature="magnitude"'
        )
    if gradients_per_step(rules) > 1 and isinstance(rules.refresh, Every) and progress.refreshes > 1:
        yield f'curvature costs {gradients_per_step(rules):.2g} gradients per step: raise refresh_every, or use "auto"'


def advice_on_rate(rules: Rules) -> Iterator[str]:
    """Compare the rate with the edge of stability."""
    progress, (plain, strain, edge) = rules.progress, strains(rules)
    assert progress.sketch is not None
    _, brake = rules.eta_and_brake()
    if strain > edge:
        yield advice.beyond_the_edge(strain, edge, "some direction")
    elif plain > edge:
        yield (
            f"{name_of_rate(rules)}·λ₁ is {plain:.3g}, beyond the edge, {edge:.3g}: without the sketch this rate would "
            "be unstable"
        )
    if brake < 0.99:
        yield (
            f"directions outside the sketch are too sharp for lr, so every step is shortened, to {brake:.2g} of its "
            f"length, as at lr={brake * float(rules.groups[0]['lr']):.2g}: a larger rank allows longer steps"
        )
    if progress.captured == 0:
        yield "no direction is too sharp for lr, so these are the steps of plain SGD"
    if isinstance(rules.rank, ByNeed) and progress.captured == rules.rank.largest:
        yield f"all {progress.captured} directions are in use: ByNeed(largest={2 * progress.captured}) allows more"


def advice_on_freshness(rules: Rules) -> Iterator[str]:
    """Say whether the sketch is a picture of the curvature, and of today's."""
    progress, sketch = rules.progress, rules.progress.sketch
    assert sketch is not None
    pairs = list(zip(sketch.values, sketch.residuals, strict=True))[: progress.captured]
    worst = max((residual / abs(value) for value, residual in pairs if value), default=0.0)
    if worst > TOO_MUCH:
        setting = "ByNeed(products=…)" if isinstance(rules.rank, ByNeed) else "power_iterations"
        yield f"the eigenpairs have not converged: a residual is {worst:.2g} of its λ. Raise {setting}"
    if rules.refresh.is_overdue(progress.seen, progress):
        yield advice.too_old(progress.age)
    if isinstance(rules.refresh, Every) and progress.turned > TOO_MUCH:
        yield (
            f"the sketch turns faster than you refresh: {progress.turned:.0%} of it lies outside the one before. Lower "
            'refresh_every, set it to "auto", or, if batches are small, refresh from more samples'
        )
    if isinstance(progress.seen, Seen) and progress.captured and progress.seen.noise > TOO_MUCH:
        yield (
            f"the curvature changes by {progress.seen.noise:.0%} from one step to the next. If batches are small, "
            "refresh from more samples (a function that yields the losses of several batches); a full batch needs "
            "nothing, as long as its loss falls"
        )


def report_on_lbfgs(status: Status, has_source: bool, precision: dtype) -> Report:
    """Report on a SketchedLBFGS: iterations, refreshes, sketch, cost, advice."""
    rows = {
        "last step": f"{'converged' if status.converged else 'ended'}: {status.reason}",
        "refreshes": f"{status.refreshes:,}",
        "sketch": f"rank {status.rank}; it divides the conditioning by {status.conditioning_removed:.2g}",
        "memory": MEMORIES[status.memory],
        "cost": f"{status.evaluations:,} evaluations, {status.products:,} products",
    }
    if status.corrected_steps:
        rows["corrected"] = (
            f"{status.corrected_steps:,} Gauss-Newton steps, for {status.corrected_cost:,.0f} evaluations; "
            f"now {status.phase}"
        )
    if status.comparisons:
        # As they were when points were added, and now.
        stages = list({points: (fitted, held_out) for points, fitted, held_out in status.comparisons}.items())
        rows["points"] = " → ".join(f"{points:,}" for points, _ in stages)
        rows["mean square"] = " → ".join(f"{fitted:.2g}" for _, (fitted, _) in stages)
        rows["held out"] = " → ".join(f"{held_out:.2g}" for _, (_, held_out) in stages)
    if status.derivative:
        rows["derivative"] = status.derivative
    return Report(
        f"SketchedLBFGS after {status.iterations:,} iterations",
        rows,
        list(advice_on_lbfgs(status, has_source, precision)),
    )


def advice_on_lbfgs(status: Status, has_source: bool, precision: dtype) -> Iterator[str]:
    """Say what is wrong, if anything is; of a closure that is not one function nothing else can be said."""
    if status.contradiction:
        yield advice.contradiction(*status.contradiction)
        return
    if not has_source:
        yield "there is no source of curvature, so this is plain L-BFGS: pass source=LeastSquares(…)"
    elif status.is_flat:
        yield "the spectrum is nearly flat: the sketch helps little here, and plain L-BFGS may do as well"
    yield from advice_on_residuals(status)
    if precision != float64:
        yield f"parameters are {precision}: use float64, since L-BFGS soon runs out of digits otherwise"
    if status.reason == "no step lowers the loss":
        yield (
            "no step lowers the loss, though its gradient promises a decrease beyond rounding: does the closure return "
            "the loss of which it computes the gradient?"
        )


def advice_on_residuals(status: Status) -> Iterator[str]:
    """Say where residuals have stopped falling far from zero, and where points are overfitted."""
    points, fitted, held_out = status.comparisons[-1] if status.comparisons else (0, 1.0, 0.0)
    if held_out > OVERFITTED * fitted:
        yield (
            f"{points:,} points are fitted {held_out / fitted:.2g} times better than points held out: the solution is "
            "wrong in between, whatever the loss is. Let more points be drawn, or make the model smaller"
        )
    elif status.stuck_at:
        others = f" and at points held out ({fitted:.2g} and {held_out:.2g}), so more will not help" if points else ""
        yield (
            f"the residuals have stopped falling at {status.stuck_at:.0%} of their size at the start{others}. With "
            "noise in the data a fit ends so, and nothing is wrong. If they could vanish, as those of an equation can, "
            "this is a wrong minimum, a plateau, or too small a model: try other seeds, and compare the losses"
        )

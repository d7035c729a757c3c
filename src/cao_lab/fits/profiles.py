"""Data profiles of Moré and Wild (2009): the share of problems that is solved, over what is billed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from cao_lab.fits.rules import BUDGET, DIGITS, ENOUGH, TAUS
from cao_lab.fits.running import Result

OURS = "cao.fit"


def bills(results: Sequence[Result], tau: float) -> Mapping[str, list[float]]:
    """Return for each method what each problem has cost it, in units of n + 1; infinite where it is not solved."""
    best: dict[tuple[str, str], float] = {}
    for one in results:
        key = (one.suite, one.problem)
        best[key] = min(best.get(key, one.lowest), one.lowest)
    found = defaultdict(list)
    for one in results:
        goal = best[one.suite, one.problem] + tau * (one.start - best[one.suite, one.problem])
        # Nothing can be lower than rounding lets it be.
        goal = goal * (1 + 1e-14)
        spent = next((bill for bill, loss in one.trace if loss <= goal), np.inf)
        found[one.method].append(spent / (one.size + 1))
    return found


def share(spent: Sequence[float], budget: float) -> float:
    """Return the share of problems that is solved within a budget."""
    return float(np.mean(np.asarray(spent) <= budget))


def worst_ratio(found: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the smallest ratio of our share to the best one's over all budgets, and where it is."""
    budgets = sorted({bill for spent in found.values() for bill in spent if np.isfinite(bill)})
    ratios = [
        (share(found[OURS], budget) / max(share(spent, budget) for spent in found.values()), budget)
        for budget in budgets
    ]
    return min(ratios)


def table(results: Sequence[Result]) -> str:
    """Return the shares at the budget that was fixed, for each collection and τ, and the fits of NIST's that agree."""
    lines = []
    for suite in dict.fromkeys(one.suite for one in results):
        members = [one for one in results if one.suite == suite]
        profiles = {tau: bills(members, tau) for tau in TAUS}
        count = len(next(iter(profiles[TAUS[0]].values())))
        lines += [
            f"\n{suite}: {count} problems; solved at {ENOUGH} and at {BUDGET}, in units of n + 1",
            "\n| method | " + " | ".join(f"τ = {tau:.0e}" for tau in TAUS) + " | seconds |",
            "|---|" + "---|" * (len(TAUS) + 1),
        ]
        for method in profiles[TAUS[0]]:
            cells = [
                " ".join(f"{share(profiles[tau][method], most) * count:.0f}" for most in (ENOUGH, BUDGET))
                for tau in TAUS
            ]
            seconds = sum(one.seconds for one in members if one.method == method)
            lines.append(f"| {method} | {' | '.join(cells)} | {seconds:.0f} |")
        for tau in TAUS:
            ratio, budget = worst_ratio(profiles[tau])
            lines.append(f"τ = {tau:.0e}: ours has at least {ratio:.2f} of the best share, least at {budget:.3g}")
        if suite == "nist":
            lines += ["", f"| method | {DIGITS} digits of all parameters | 4 digits |", "|---|---|---|"]
            for method in profiles[TAUS[0]]:
                reached = [one.digits for one in members if one.method == method]
                lines.append(f"| {method} | {sum(d >= DIGITS for d in reached)} | {sum(d >= 4 for d in reached)} |")
    return "\n".join(lines)


def profile_figure(results: Sequence[Result]) -> Figure:
    """Draw the data profiles of all unbounded problems together, one picture for each τ."""
    free = [one for one in results if "bounded" not in one.suite]
    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    for axes, tau in zip(figure.subplots(1, len(TAUS), sharey=True), TAUS, strict=True):
        for method, spent in bills(free, tau).items():
            places = np.sort(np.asarray(spent))
            heights = np.arange(1, len(places) + 1) / len(places)
            width = 2.0 if method == OURS else 1.0
            axes.step(places, heights, where="post", label=method, linewidth=width, zorder=3 if method == OURS else 2)
        axes.set(xscale="log", xlim=(0.3, BUDGET), ylim=(0, 1), title=f"τ = {tau:.0e}", xlabel="bill / (n + 1)")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of problems solved")
    figure.axes[-1].legend(frameon=False, fontsize=7, loc="lower right")
    return figure

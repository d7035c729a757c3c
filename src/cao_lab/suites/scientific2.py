"""Full-batch solvers in the same seconds, against the methods that the suite `scientific` lacked, and where they cross.

The rules, fixed before the runs that they judge:

- One thread, and seconds of the processor for everything that a method does, dense algebra included; only measuring
  errors and writing logs are left out. Products and Jacobians are counted, and have no price.
- Seeds 31 to 35 judge. Design used seeds 0 and from 100 on. All methods begin at the best point of the same Adam
  phase: 1,000 evaluations at a rate of 0.001, which nobody's seconds contain.
- `scientific-2`: the eight problems of `scientific` at its size (921 parameters, 1,000 points), 30 s per run.
  `scientific-2-points`: 6,000 points, as many more on the sides, 60 s. `crossover`: two problems, 3,000 points, widths
  20 to 200 (921 to 81,201 parameters), 300 s, each method while its matrices fit.
- Peers have the settings that their authors name. Where these tune for each problem, one setting was chosen on seed
  100 of `poisson` or `burgers`, and is in the method's file: ENGD-W, SPRING, and the rows that Gauss–Newton by target
  ratio keeps.
- The plan takes about ten core hours, and may end early. So runs are made in this order, and each suite in the order
  of its list: the first two lists of `scientific-2` (its first round: one seed of all problems, the strongest peers by
  what was known before, then three more); the first list of `scientific-2-points`; the rest of `scientific-2`, of
  `scientific-2-points`, and `crossover`. What is reported is what is finished, with the number of problems and seeds.
- A run's loss is the lowest it has seen, its error that of the same point. A stalled run keeps both to the end.
  Values after a share of the time are those of the last record by then.
- Ratios are ours over theirs for each problem and seed, and "best of all peers" is the best of those that were run
  there, at that very moment. Medians are over problems and seeds; intervals are for problems drawn anew, each with
  all its seeds. Goals: loss after 10, 30 and 100 % at most half the best peer's in the median, and on no problem's
  median above 1.2 of it; error at the end at most half; as many wrong solutions as the best peer, or fewer.
- Seconds to an error of 1e-1, 1e-2 and 1e-3 are those of the first record at or below it, of about 100 per run. The
  goal for 1e-2, half the best peer's, is about growing points, which no problem of these suites offers; it is shown.
- Wrong is a relative L2 error above 0.5 at the end, as in `scientific`.
"""

from collections.abc import Mapping
from dataclasses import replace

from cao_lab.solvers.budget import Budget
from cao_lab.solvers.contest import Contest, with_seed
from cao_lab.solvers.method import Method
from cao_lab.solvers.methods.dense import ScipyBFGS
from cao_lab.solvers.methods.first_order import Soap
from cao_lab.solvers.methods.levenberg_marquardt import LevenbergMarquardt
from cao_lab.solvers.methods.natural_gradient import NaturalGradient
from cao_lab.solvers.methods.nncg import NNCG
from cao_lab.solvers.methods.quasi_newton import ScipyLBFGSB, TorchLBFGS
from cao_lab.solvers.methods.self_scaled import SelfScaledBFGS, SelfScaledBroyden
from cao_lab.solvers.methods.sketched import Sketched, SketchedDense, SketchedPairs
from cao_lab.solvers.methods.target_ratio import TargetRatio
from cao_lab.suites.scientific import ADAM, PROBLEMS, SIZE
from cao_lab.tasks.pde.problem import ProblemConfig

SEEDS = (31, 32, 33, 34, 35)

STRONGEST: Mapping[str, Method] = {
    "sketched-lbfgs": Sketched(),
    "ssbroyden": SelfScaledBroyden(),
    "levenberg-marquardt": LevenbergMarquardt(),
    "target-ratio": TargetRatio(),
}
STRONG: Mapping[str, Method] = {
    "ssbfgs": SelfScaledBFGS(),
    "scipy-bfgs": ScipyBFGS(),
    "engd-w": NaturalGradient(),
}
OTHERS: Mapping[str, Method] = {
    "spring": NaturalGradient(momentum=0.3),
    "scipy-lbfgsb": ScipyLBFGSB(),
    "scipy-lbfgsb-400": ScipyLBFGSB(history_size=400),
    "torch-lbfgs": TorchLBFGS(),
    "lbfgs-nncg-30": NNCG(lbfgs_share=0.5, max_products=30),
    "lbfgs-nncg-100": NNCG(lbfgs_share=0.5, max_products=100),
    "soap-0.001": Soap(lr=1e-3),
    "soap": Soap(),
    "soap-0.01": Soap(lr=1e-2),
}
METHODS = {**STRONGEST, **STRONG, **OTHERS}


def contests(size: ProblemConfig, methods: Mapping[str, Method], seed: int, seconds: float) -> list[Contest]:
    """Return one contest per problem."""
    budget = Budget(seconds=seconds)
    return [with_seed(Contest(equation, size, methods, ADAM, budget), seed) for equation in PROBLEMS]


SCIENTIFIC_2 = [
    *contests(SIZE, STRONGEST, SEEDS[0], 30.0),
    *contests(SIZE, STRONG, SEEDS[0], 30.0),
    *contests(SIZE, OTHERS, SEEDS[0], 30.0),
    *(one for seed in SEEDS[1:] for one in contests(SIZE, {**STRONGEST, **STRONG}, seed, 30.0)),
    *contests(SIZE, OTHERS, SEEDS[1], 30.0),
]
"""Three lists of seed 31, then the other seeds; the weaker peers have two."""

MANY_POINTS = replace(SIZE, interior=6_000, initial=769, boundary=301)
SCIENTIFIC_2_POINTS = [
    *contests(MANY_POINTS, STRONGEST, SEEDS[0], 60.0),
    *contests(MANY_POINTS, {label: STRONG[label] for label in ("ssbfgs", "scipy-bfgs")}, SEEDS[0], 60.0),
    *(
        one
        for seed in SEEDS[1:3]
        for one in contests(MANY_POINTS, {**STRONGEST, "ssbfgs": SelfScaledBFGS()}, seed, 60.0)
    ),
]

WIDTHS = (20, 40, 70, 100, 200)
MOST_DENSE = 70
"""The largest width at which a dense matrix is affordable: 10,221 parameters."""


def crossing(width: int) -> Mapping[str, Method]:
    """Return who fights at a width: all but what no longer fits."""
    limited: dict[str, Method] = {
        "sketched-lbfgs": Sketched(),
        "sketched-lbfgs-pairs": SketchedPairs(),
        "scipy-lbfgsb": ScipyLBFGSB(),
    }
    dense: dict[str, Method] = {
        "sketched-lbfgs-dense": SketchedDense(),
        "ssbroyden": SelfScaledBroyden(max_size=11_000),
        "levenberg-marquardt": LevenbergMarquardt(),
    }
    return {**limited, **(dense if width <= MOST_DENSE else {})}


CROSSOVER = [
    with_seed(
        Contest(
            equation,
            replace(SIZE, width=width, interior=3_000, initial=385, boundary=151),
            crossing(width),
            ADAM,
            Budget(seconds=300.0),
        ),
        SEEDS[0],
    )
    for width in WIDTHS
    for equation in ("burgers", "poisson")
]

"""Full-batch problems with a stated L2 on data that scikit-learn ships: here curvature should pay.

Three convex ones in double precision and a deep autoencoder. Adam and SGD with momentum are tuned as in `mini-tuned`;
L-BFGS, SketchedLBFGS and CAO with its defaults are not tuned at all. Distances from the optimum
are declared in `facts.DISTANCES`, the optimum being the lowest loss that any run of the task reached.
"""

from dataclasses import dataclass, replace

from cao_lab.config import RunConfig
from cao_lab.optimizer_config import OptimizerConfig
from cao_lab.runs.methods.cao import CAODefaultsConfig
from cao_lab.runs.methods.first_order import AdamConfig, SGDConfig
from cao_lab.runs.methods.lbfgs import LBFGSConfig, SketchedLBFGSConfig
from cao_lab.suites.rounds import Rounds, together
from cao_lab.suites.tuned import tune

SEED = 0
CAO_RATES = (1.0, 3.16, 10.0)
# A step of L-BFGS is ten iterations, each with a gradient or two.
LBFGS_ITERATIONS = 10

SGD = SGDConfig(weight_decay=0.0, max_gradient_norm=None)
ADAM = AdamConfig(weight_decay=0.0, max_gradient_norm=None)
CAO = CAODefaultsConfig(weight_decay=0.0, max_gradient_norm=None)


@dataclass(frozen=True)
class IllConditioned:
    """A problem, its budget of steps, and the middles of the grids of rates, guessed from the size of its curvature."""

    run: RunConfig
    sgd_lr: float
    adam_lr: float


def full_batch(**settings: object) -> RunConfig:
    """Return a run on the whole training set at once."""
    return RunConfig(SGD, batch_size=None, seed=SEED, **settings)  # type: ignore[arg-type]


PROBLEMS = (
    # The features keep their units, up to 4254: the largest curvature is about 1e5.
    IllConditioned(
        full_batch(dataset="breast-cancer", model="linear", epochs=400, l2=1e-3, precision="fp64"), 1e-6, 1e-2
    ),
    IllConditioned(full_batch(dataset="digits", model="linear", epochs=400, l2=1e-3, precision="fp64"), 0.1, 1e-2),
    IllConditioned(full_batch(dataset="diabetes", model="linear", epochs=400, l2=1e-3, precision="fp64"), 0.1, 1e-2),
    IllConditioned(full_batch(dataset="digits", model="autoencoder", epochs=1000, l2=1e-5), 0.1, 1e-2),
)


def ill_conditioned() -> Rounds:
    """Solve each problem with every method."""
    yield from together(chain for problem in PROBLEMS for chain in methods(problem))


def methods(problem: IllConditioned) -> list[Rounds]:
    """Return the tuned first-order methods and the untuned second-order ones."""
    run = problem.run
    tuned: list[OptimizerConfig] = [replace(SGD, lr=problem.sgd_lr), replace(ADAM, lr=problem.adam_lr)]
    solvers: list[OptimizerConfig] = [LBFGSConfig(), SketchedLBFGSConfig()]
    sketched: list[OptimizerConfig] = [replace(CAO, lr=lr) for lr in CAO_RATES]
    untuned = [
        *(replace(run, optimizer=one, epochs=run.epochs // LBFGS_ITERATIONS) for one in solvers),
        *(replace(run, optimizer=one) for one in sketched),
    ]
    return [*(tune(replace(run, optimizer=optimizer), ()) for optimizer in tuned), once(untuned)]


def once(configs: list[RunConfig]) -> Rounds:
    """Ask for some runs and nothing after them."""
    yield configs

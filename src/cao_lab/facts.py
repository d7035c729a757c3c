"""What is known of datasets, suites and methods before any run, each written down once: tables, without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

SuiteKind: TypeAlias = Literal[
    "comparison", "repeat", "tuned", "sweep", "optimum", "stability", "rates", "solvers", "alarms"
]


@dataclass(frozen=True)
class Thresholds:
    """Train losses to reach: the one that claims are judged by, and the range around it."""

    primary: float
    sweep: tuple[float, ...]


PAPER_THRESHOLDS = Thresholds(0.75, (1.0, 0.9, 0.8, 0.75, 0.7, 0.6))
NARROW_CIFAR100 = Thresholds(2.0, (3.0, 2.5, 2.25, 2.0, 1.75, 1.5, *PAPER_THRESHOLDS.sweep))
DIGITS_THRESHOLDS = Thresholds(0.1, (0.5, 0.3, 0.2, 0.1, 0.05))
TEXT_THRESHOLDS = Thresholds(2.0, (2.6, 2.4, 2.2, 2.0, 1.8, 1.6))
DISTANCES = Thresholds(1e-3, (1e-1, 1e-2, 1e-3, 1e-4))
PAPER_TASK = "cifar100-resnet18"
PAPER_COSTS: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]] = {
    "cifar10-resnet18": ({"seconds": 7.46, "memory": 936}, {"seconds": 8.78, "memory": 2508}),
    "cifar10-resnet34": ({"seconds": 10.56, "memory": 1593}, {"seconds": 12.83, "memory": 4405}),
    "cifar100-resnet18": ({"seconds": 7.40, "memory": 1130}, {"seconds": 8.77, "memory": 2700}),
    "cifar100-resnet34": ({"seconds": 10.73, "memory": 1628}, {"seconds": 13.01, "memory": 4354}),
}
"""The paper's table of costs, seconds an epoch and peak MiB: SGD's, and those of CAO with k = 1."""


@dataclass(frozen=True)
class DatasetInfo:
    """What a report needs to know of a dataset."""

    classes: int | None
    """None for regression."""
    thresholds: Thresholds | None = None
    """Declared train losses; None where none are."""
    models: tuple[str, ...] | None = None
    """The models, as tasks name them, for which they are declared; others have shares of ln(classes)."""
    narrow: Thresholds | None = None
    """Declared for the same models at less width on all images: the paper's, or others if these are out of reach."""


PAPER_MODELS = ("resnet18", "resnet34")
MODELS = (*PAPER_MODELS, "linear", "mlp", "autoencoder", "transformer")
DATASETS: Mapping[str, DatasetInfo] = {
    "cifar10": DatasetInfo(10, PAPER_THRESHOLDS, PAPER_MODELS, narrow=PAPER_THRESHOLDS),
    "cifar100": DatasetInfo(100, PAPER_THRESHOLDS, PAPER_MODELS, narrow=NARROW_CIFAR100),
    "digits": DatasetInfo(10, DIGITS_THRESHOLDS),
    "breast-cancer": DatasetInfo(2),
    "diabetes": DatasetInfo(None),
    "pydoc": DatasetInfo(96, TEXT_THRESHOLDS),
}

CURVATURES: Mapping[str, float] = {"hessian": 3.2, "gauss-newton": 2.1}
"""Matrices, and the gradient evaluations that a product with one costs: assumed, until `cao bench` has measured it."""

# The command line takes its choices from the tables; a type checker cannot look into them.
if TYPE_CHECKING:
    DatasetName: TypeAlias = str
    ModelName: TypeAlias = str
    CurvatureName: TypeAlias = str
else:
    DatasetName = Literal[tuple(DATASETS)]
    ModelName = Literal[MODELS]
    CurvatureName = Literal[tuple(CURVATURES)]


def dataset_of(task: str) -> tuple[DatasetInfo | None, str]:
    """Return the dataset of a task and the rest of the task's name: `resnet18w8-n5000`."""
    for name, info in DATASETS.items():
        if task == name or task.startswith(f"{name}-"):
            return info, task[len(name) + 1 :]
    return None, task


def product_price_row(curvature: str) -> str:
    """Return the name of the row in `logs/bench.json` that replaces the assumed price of a product."""
    return f"{curvature.replace('-', '_')}_product_per_gradient"


def judged_datasets(models: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the datasets with declared thresholds, or those among them with the paper's models."""
    return tuple(name for name, info in DATASETS.items() if info.thresholds and models in (None, info.models))


@dataclass(frozen=True)
class SuiteInfo:
    """What a suite asks, and what was fixed for it in advance."""

    kind: SuiteKind
    runs: str
    """Where its runs are listed: a module of `cao_lab.suites`, and a name in it."""
    thresholds: Thresholds | None = None
    """Shares of the way from the first loss to the lowest; None takes the dataset's thresholds."""
    about: str = ""
    """What it asks and how long it takes, on two cores unless it says otherwise."""
    figures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Names of figures other than the usual, by task and kind."""


SUITES: Mapping[str, SuiteInfo] = {
    "paper": SuiteInfo(
        "comparison",
        "paper:PAPER",
        about="the paper's tables and figures, 17.4 GPU-hours",
        figures={
            ("cifar100-resnet18", "train-loss"): "figure-1-train-loss-c100-r18",
            ("cifar100-resnet18", "train-loss-early"): "figure-2-train-loss-c100-r18-early",
            ("cifar100-resnet18", "rank-ablation"): "figure-3-rank-ablation-c100-r18",
            ("cifar10-resnet18", "train-loss"): "appendix-a-train-loss-c10-r18",
            ("cifar10-resnet34", "train-loss"): "appendix-b-train-loss-c10-r34",
            ("cifar100-resnet34", "train-loss"): "appendix-c-train-loss-c100-r34",
            ("cifar100-resnet18", "train-accuracy"): "appendix-d-train-accuracy-c100-r18",
        },
    ),
    "narrow": SuiteInfo("comparison", "narrow:NARROW", about="the paper's protocol at width 8, 45 core hours"),
    "mini": SuiteInfo("comparison", "mini:MINI", about="the paper's questions at a small machine's size, 6 h"),
    "mini-again": SuiteInfo("repeat", "mini:MINI_AGAIN", about="CAO's runs of version 0.1 on today's code, 45 min"),
    "mini-tuned": SuiteInfo("tuned", "tuned:mini_tuned", about="is CAO better than others tuned equally? 1 h"),
    "sensitivity": SuiteInfo(
        "sweep", "paper:SENSITIVITY", about="the paper's sweep of damping and refresh interval, 2.9 GPU-hours"
    ),
    "mini-sensitivity": SuiteInfo(
        "sweep", "mini:MINI_SENSITIVITY", about="the sweep of damping and refresh interval at that size, 70 min"
    ),
    "digits-tuned": SuiteInfo("tuned", "tuned:digits_tuned", about="the same on digits, 3 min"),
    "transformer": SuiteInfo(
        "tuned", "transformer:transformer", about="the same on text, with a small transformer, 30 min"
    ),
    "ill-conditioned": SuiteInfo(
        "optimum",
        "ill_conditioned:ill_conditioned",
        DISTANCES,
        about="does curvature pay where conditioning is the problem? 10 min",
    ),
    "stable-range": SuiteInfo(
        "stability", "stable_range:stable_range", about="how large may the rate over the damping be? 45 min"
    ),
    "demo-conditioning": SuiteInfo(
        "optimum", "demo:CONDITIONING", DISTANCES, about="does curvature pay on a badly scaled regression? 20 s"
    ),
    "demo": SuiteInfo("comparison", "paper:DEMO", about="does everything work here? 70 s"),
    "demo-fit": SuiteInfo("solvers", "scientific:DEMO", about="does a sketch pay in solving an equation? 20 s"),
    "robust": SuiteInfo("rates", "robust:SWEEPS", about="are CAO's defaults ever worse than SGD or AdamW? 20 min"),
    "watch": SuiteInfo(
        "alarms", "watch:TASKS", about="does the sharpness tell that a training will diverge? 15 core minutes"
    ),
    "scientific": SuiteInfo(
        "solvers", "scientific:SCIENTIFIC", about="which full-batch solver is best for the same cost? 25 min to 2 h"
    ),
    "scientific-points": SuiteInfo(
        "solvers", "scientific:MORE_POINTS", about="do more points lower the errors? 12 min"
    ),
    "rathore": SuiteInfo(
        "solvers", "scientific:AT_FULL_WIDTH", about="full-batch solvers at the width of Rathore et al. (2024), 3 h"
    ),
    "scientific-2": SuiteInfo(
        "solvers",
        "scientific2:SCIENTIFIC_2",
        about="the same against stronger peers, in the same seconds, 4 core hours",
    ),
    "scientific-2-points": SuiteInfo(
        "solvers", "scientific2:SCIENTIFIC_2_POINTS", about="that with six times the points, 2.5 core hours"
    ),
    "crossover": SuiteInfo(
        "solvers", "scientific2:CROSSOVER", about="up to which width does a dense memory pay? 4 core hours"
    ),
}
"""In the order in which a report shows them; suites that are not listed follow, and nothing is judged by them."""

SEARCHING: tuple[SuiteKind, ...] = ("tuned", "optimum", "stability")
"""Kinds that try rates on purpose at which runs fail; a divergence there is no failure of the method."""

REPEATING: tuple[SuiteKind, ...] = ("comparison", "repeat", "sweep")
"""Kinds whose suites give a task the same budget, so that a label and a seed that two of them share are one run."""

RUN_ELSEWHERE: Mapping[SuiteKind, str] = {"rates": "robust", "solvers": "contests", "alarms": "watch"}
"""Kinds of suites that are not lists of training runs, and the modules of `cao_lab.suites` that list and run them."""


def kind_of(suite: str) -> SuiteKind | None:
    """Return what a suite asks, None for one of the user's own."""
    return SUITES[suite].kind if suite in SUITES else None


def suites_of(kinds: Iterable[SuiteKind]) -> tuple[str, ...]:
    """Return the suites of some kinds, in order."""
    wanted = set(kinds)
    return tuple(name for name, info in SUITES.items() if info.kind in wanted)


@dataclass(frozen=True)
class MethodInfo:
    """How an optimizer is shown."""

    title: str
    colour: str | None = None
    """A colour that is always its own; without one, a colour that nobody else has in the figure."""
    has_epochs: bool = True
    """False where an epoch is several iterations, and compares with nobody's."""
    has_edge: bool = False
    """Whether 2(1+β)/α is the curvature at which its step turns unstable."""


METHODS: Mapping[str, MethodInfo] = {
    "cao": MethodInfo("CAO", has_edge=True),
    "cao-defaults": MethodInfo("CAO with defaults", "#ea68c3", has_edge=True),
    "cao-adam": MethodInfo("CAO in Adam's metric", "#755b00"),
    "sgd": MethodInfo("SGD", "#00287b", has_edge=True),
    "adam": MethodInfo("Adam", "#00a856"),
    "adamw": MethodInfo("AdamW", "#157591"),
    "lbfgs": MethodInfo("L-BFGS", "#7572e8", has_epochs=False),
    "sketched-lbfgs": MethodInfo("SketchedLBFGS", "#1b0205", has_epochs=False),
    "adahessian": MethodInfo("AdaHessian", "#f86050"),
    "soap": MethodInfo("SOAP", "#5bb6f7"),
    "muon": MethodInfo("Muon", "#a9b600"),
    "adagrad": MethodInfo("AdaGrad", "#9c828f"),
    "rmsprop": MethodInfo("RMSProp", "#82b68f"),
    "shampoo": MethodInfo("Shampoo", "#410db6"),
}


def method_info(name: str) -> MethodInfo:
    """Return how an optimizer is shown; one that is not listed goes by its name."""
    return METHODS.get(name, MethodInfo(name))

"""What is known of datasets, suites and methods before any run, each written down once: tables, without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SuiteKind: TypeAlias = Literal["comparison", "tuned", "sweep", "optimum", "stability"]


@dataclass(frozen=True)
class Thresholds:
    """Train losses to reach: the one that claims are judged by, and the range around it."""

    primary: float
    sweep: tuple[float, ...]


PAPER_THRESHOLDS = Thresholds(0.75, (1.0, 0.9, 0.8, 0.75, 0.7, 0.6))
DIGITS_THRESHOLDS = Thresholds(0.1, (0.5, 0.3, 0.2, 0.1, 0.05))
DISTANCES = Thresholds(1e-3, (1e-1, 1e-2, 1e-3, 1e-4))
PAPER_TASK = "cifar100-resnet18"


@dataclass(frozen=True)
class DatasetInfo:
    """What a report needs to know of a dataset."""

    classes: int | None
    """None for regression."""
    thresholds: Thresholds | None = None
    """Declared train losses; None where none are."""
    models: tuple[str, ...] | None = None
    """The models, as tasks name them, for which they are declared; others have shares of ln(classes)."""


PAPER_MODELS = ("resnet18", "resnet34")
DATASETS: Mapping[str, DatasetInfo] = {
    "cifar10": DatasetInfo(10, PAPER_THRESHOLDS, PAPER_MODELS),
    "cifar100": DatasetInfo(100, PAPER_THRESHOLDS, PAPER_MODELS),
    "digits": DatasetInfo(10, DIGITS_THRESHOLDS),
    "breast-cancer": DatasetInfo(2),
    "diabetes": DatasetInfo(None),
}


def dataset_of(task: str) -> tuple[DatasetInfo | None, str]:
    """Return the dataset of a task and the rest of the task's name: `resnet18w8-n5000`."""
    for name, info in DATASETS.items():
        if task == name or task.startswith(f"{name}-"):
            return info, task[len(name) + 1 :]
    return None, task


def judged_datasets(models: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the datasets with declared thresholds, or those among them with the paper's models."""
    return tuple(name for name, info in DATASETS.items() if info.thresholds and models in (None, info.models))


@dataclass(frozen=True)
class SuiteInfo:
    """What a suite asks, and what was fixed for it in advance."""

    kind: SuiteKind
    budget: Mapping[str, int]
    """Epochs, by how the names of its tasks begin."""
    thresholds: Thresholds | None = None
    """Shares of the way from the first loss to the lowest; None takes the dataset's thresholds."""
    figures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Names of figures other than the usual, by task and kind."""


SUITES: Mapping[str, SuiteInfo] = {
    "paper": SuiteInfo(
        "comparison",
        {"cifar100": 75, "cifar10": 50},
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
    "mini": SuiteInfo("comparison", {"cifar": 20}),
    "mini-tuned": SuiteInfo("tuned", {"cifar100": 10}),
    "sensitivity": SuiteInfo("sweep", {"cifar100": 75}),
    "ill-conditioned": SuiteInfo("optimum", {"digits-autoencoder": 1000, "": 400}, DISTANCES),
    "stable-range": SuiteInfo("stability", {"digits": 20, "cifar10": 5}),
    "demo-conditioning": SuiteInfo("optimum", {"breast-cancer": 400}, DISTANCES),
    "demo": SuiteInfo("comparison", {"digits": 40}),
}
"""In the order in which a report shows them; suites that are not listed follow, and nothing is judged by them."""

SEARCHING: tuple[SuiteKind, ...] = ("tuned", "optimum", "stability")
"""Kinds that try rates on purpose at which runs fail; a divergence there is no failure of the method."""


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
    """A colour that is always its own."""
    has_epochs: bool = True
    """False where an epoch is several iterations, and compares with nobody's."""
    has_edge: bool = False
    """Whether 2(1+β)/α is the curvature at which its step turns unstable."""


METHODS: Mapping[str, MethodInfo] = {
    "cao": MethodInfo("CAO", has_edge=True),
    "sgd": MethodInfo("SGD", "#00287b", has_edge=True),
    "adam": MethodInfo("Adam", "#00a856"),
    "adamw": MethodInfo("AdamW", "#157591"),
    "lbfgs": MethodInfo("L-BFGS", "#7572e8", has_epochs=False),
    "adahessian": MethodInfo("AdaHessian"),
    "soap": MethodInfo("SOAP"),
    "muon": MethodInfo("Muon"),
}


def method_info(name: str) -> MethodInfo:
    """Return how an optimizer is shown; one that is not listed goes by its name."""
    return METHODS.get(name, MethodInfo(name))

"""Claims against tasks: what the logs say of each claim of the paper, in one word a task."""

from typing import TypeAlias

from pandas import DataFrame

from cao_lab.facts import DATASETS
from cao_lab.reporting.verdicts import Verdict

WORDS = {
    Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.RATE: "rate only", Verdict.TIE: "tie",
    Verdict.UNDECIDED: "open",
}  # fmt: skip
"""Verdicts that say something, in a word."""
DATASET_TITLES = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "Digits", "breast-cancer": "Breast cancer",
    "diabetes": "Diabetes", "pydoc": "Python's documentation",
}  # fmt: skip
MODEL_TITLES = {
    "resnet18": "ResNet-18", "resnet34": "ResNet-34", "linear": "linear model", "mlp": "MLP",
    "autoencoder": "autoencoder", "transformer": "transformer",
}  # fmt: skip


Matrix: TypeAlias = dict[tuple[str, str], dict[str, DataFrame]]
"""For each suite and task the rows of the audit that say something, by claim."""


def matrix(verdicts: DataFrame) -> Matrix:
    """Return what each suite and task says of the claims that it has judged, in the order of the audit."""
    told = verdicts[verdicts["verdict"].isin([str(one) for one in WORDS])]
    columns: Matrix = {}
    for (suite, task, claim), rows in told.groupby(["suite", "task", "claim"], sort=False):
        columns.setdefault((str(suite), str(task)), {})[str(claim)] = rows
    return columns


def task_title(task: str) -> str:
    """Return "CIFAR-100, ResNet-18 of width 8, 5,000 images" for `cifar100-resnet18w8-n5000`."""
    dataset = next((name for name in DATASETS if task == name or task.startswith(f"{name}-")), None)
    if dataset is None:
        return task
    words = [DATASET_TITLES.get(dataset, dataset)]
    for piece in task[len(dataset) + 1 :].split("-"):
        words.append(piece_title(piece, "images" if dataset.startswith("cifar") else "samples"))
    return ", ".join(filter(None, words))


def piece_title(piece: str, samples: str) -> str:
    """Return what one piece of a task's name says."""
    model = next((name for name in MODEL_TITLES if piece == name or piece.startswith(f"{name}w")), None)
    if model is not None:
        width = piece[len(model) + 1 :]
        return MODEL_TITLES[model] + (f" of width {width}" if width else "")
    if piece.startswith("n") and piece[1:].isdecimal():
        return f"{int(piece[1:]):,} {samples}"
    if piece.startswith("b") and piece[1:].isdecimal():
        return f"batches of {piece[1:]}"
    if piece.startswith("l2="):
        return f"penalty {piece[3:]}"
    return "full batch" if piece == "full" else piece

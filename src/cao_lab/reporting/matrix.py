"""Claims against tasks: what the logs say of each claim of the paper, in one word a task."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Cell:
    """What one task says of one claim: words, each with the part of the claim that it is about, and the evidence."""

    words: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    parts: tuple[str, ...]
    evidence: tuple[str, ...]


def matrix(verdicts: DataFrame) -> tuple[list[str], dict[tuple[str, str], dict[str, Cell]]]:
    """Return the claims, and for each suite and task that judged any of them, what it says, by claim."""
    told = verdicts[verdicts["verdict"].isin([str(one) for one in WORDS])]
    columns: dict[tuple[str, str], dict[str, Cell]] = {}
    for (suite, task, claim), rows in told.groupby(["suite", "task", "claim"], sort=False):
        found = tuple(Verdict(one) for one in rows["verdict"])
        words = tuple(WORDS[one] for one in found)
        cell = Cell(words, found, tuple(rows["part"]), tuple(rows["evidence"]))
        columns.setdefault((str(suite), str(task)), {})[str(claim)] = cell
    return list(dict.fromkeys(verdicts["claim"])), columns


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

"""The problems: NIST's reference fits, and the collections of Moré and Wild and of Cartis and Roberts."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FitProblem:
    """Residuals with their Jacobian, a start, and the certified parameters if there are any."""

    suite: str
    name: str
    start: Array
    residuals: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]
    certified: Array | None = None
    bounds: tuple[Array, Array] | None = None


def exponentials(b: Tensor, x: Tensor) -> Tensor:
    """Return three exponentials."""
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


def two_peaks(b: Tensor, x: Tensor) -> Tensor:
    """Return two Gaussian peaks over an exponential."""
    first, second = b[2] * torch.exp(-(((x - b[3]) / b[4]) ** 2)), b[5] * torch.exp(-(((x - b[6]) / b[7]) ** 2))
    return b[0] * torch.exp(-b[1] * x) + first + second


def cubics(b: Tensor, x: Tensor) -> Tensor:
    """Return a quotient of cubic polynomials."""
    top = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return top / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def oscillations(b: Tensor, x: Tensor) -> Tensor:
    """Return a yearly cycle and two of unknown length."""
    total = b[0] + b[1] * torch.cos(2 * math.pi * x / 12) + b[2] * torch.sin(2 * math.pi * x / 12)
    for at in (3, 6):
        angle = 2 * math.pi * x / b[at]
        total = total + b[at + 1] * torch.cos(angle) + b[at + 2] * torch.sin(angle)
    return total


def saturation(b: Tensor, x: Tensor) -> Tensor:
    """Return an exponential approach."""
    return b[0] * (1 - torch.exp(-b[1] * x))


def decay_over_line(b: Tensor, x: Tensor) -> Tensor:
    """Return an exponential over a straight line."""
    return torch.exp(-b[0] * x) / (b[1] + b[2] * x)


MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": saturation,
    "Chwirut1": decay_over_line,
    "Chwirut2": decay_over_line,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": oscillations,
    "Eckerle4": lambda b, x: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": two_peaks,
    "Gauss2": two_peaks,
    "Gauss3": two_peaks,
    "Hahn1": cubics,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": exponentials,
    "Lanczos2": exponentials,
    "Lanczos3": exponentials,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * torch.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Misra1a": saturation,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x: b[0] - b[1] * x[:, 0] * torch.exp(-b[2] * x[:, 1]),
    "Rat42": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - torch.arctan(b[2] / (x - b[3])) / math.pi,
    "Thurber": cubics,
}


def nist(folder: Path) -> Iterator[FitProblem]:
    """Read NIST's files (https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml), each with its two starts."""
    for name in MODELS:
        starts, certified, table = read_nist((folder / f"{name}.dat").read_text())
        y, x = torch.from_numpy(table[:, 0]), torch.from_numpy(table[:, 1:]).squeeze(1)
        y = y.log() if name == "Nelson" else y
        for number, start in enumerate(starts, 1):
            yield of_torch("nist", f"{name}-{number}", start, residuals_of(name, x, y), certified)


def residuals_of(name: str, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the residuals of a model."""
    return lambda b: MODELS[name](b, x) - y


def read_nist(text: str) -> tuple[Array, Array, Array]:
    """Return both starts, the certified parameters and the data."""
    rows = [[float(part) for part in row.split()[:3]] for row in re.findall(r"^ *b\d+ *= *(.*)$", text, re.MULTILINE)]
    data = text[text.rindex("Data:") :].splitlines()[1:]
    table = np.array([[float(part) for part in line.split()] for line in data if line.strip()])
    parameters = np.array(rows)
    return parameters[:, :2].T, parameters[:, 2], table


def of_torch(
    suite: str, name: str, start: Array, residuals: Callable[[Tensor], Tensor], certified: Array | None
) -> FitProblem:
    """Return a problem whose residuals torch differentiates."""
    slope = torch.func.jacrev(residuals)
    return FitProblem(
        suite,
        name,
        start,
        lambda x: residuals(torch.from_numpy(x)).numpy(),
        lambda x: slope(torch.from_numpy(x)).numpy(),
        certified,
    )


def collection(suite: str) -> Iterator[FitProblem]:
    """Return a collection of optimagic's: "more_wild" or "cartis_roberts"."""
    from optimagic.benchmarking.get_benchmark_problems import get_benchmark_problems  # noqa: PLC0415

    for name, problem in get_benchmark_problems(suite).items():
        start = np.asarray(problem["inputs"]["params"], dtype=np.float64)
        yield of_numpy(suite.replace("_", "-"), name, start, problem["noise_free_fun"])


def of_numpy(suite: str, name: str, start: Array, function: Callable[[Any], Any]) -> FitProblem:
    """Return a problem of numpy's: differentiated by complex steps where they agree with differences."""

    def residuals(x: Array) -> Array:
        return np.asarray(function(x), dtype=np.float64)

    def by_complex_steps(x: Array) -> Array:
        columns = [np.imag(function(x + 1e-30j * unit)) / 1e-30 for unit in np.eye(len(x))]
        return np.array(columns, dtype=np.float64).T

    def by_differences(x: Array) -> Array:
        steps = 6e-6 * np.maximum(1.0, np.abs(x))
        columns = [
            (residuals(x + h * unit) - residuals(x - h * unit)) / (2 * h)
            for h, unit in zip(steps, np.eye(len(x)), strict=True)
        ]
        return np.array(columns).T

    try:
        near = start + 1e-3 * np.cos(np.arange(len(start)))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A part is lost where a function keeps real numbers.
            agrees = np.allclose(by_complex_steps(near), by_differences(near), rtol=1e-5, atol=1e-5)
    except (TypeError, ValueError):
        agrees = False
    return FitProblem(suite, name, start, residuals, by_complex_steps if agrees else by_differences)

"""SSBFGS and SSBroyden: dense quasi-Newton updates that scale themselves (Al-Baali; Urbán et al. 2024)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch

from cao_lab.solvers.methods.dense import Matrix, Vector, check_size, descend
from cao_lab.solvers.objective import Objective
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

LEAST_SPREAD = 1e-14
"""bh − 1, where rounding hides it."""
SYMMETRIC_EVERY = 5
"""Updates between two corrections, each of which takes as long as an update."""


class Choice(NamedTuple):
    """A member of Broyden's family, and what H is divided by."""

    share: float
    """φ: one is BFGS, zero is DFP."""
    scale: float
    """τ."""


@dataclass(frozen=True)
class SelfScaledBFGS:
    """BFGS whose matrix is divided by τ = min(1, sᵀy/sᵀBs) first; search and first step are those of scipy's BFGS."""

    max_size: int = 10_000
    name = "ssbfgs"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> str:
        """Run until the budget is spent, or the search fails."""
        check_size(objective, self.max_size, self.name)
        return descend(objective, self.learner())

    def learner(self) -> Callable[[Matrix, Vector, Vector, Vector], None]:
        """Return a function that learns pairs, and makes H symmetric now and then.

        A product of matrices is symmetric up to rounding on most processors and to the last bit on some. What is not
        symmetric would be divided by τ each time, and never corrected.
        """
        count = itertools.count(1)

        def learn(inverse: Matrix, step: Vector, change: Vector, image: Vector) -> None:
            self.learn(inverse, step, change, image)
            if next(count) % SYMMETRIC_EVERY == 0:
                np.add(inverse, inverse.T, out=inverse)
                np.multiply(inverse, 0.5, out=inverse)

        return learn

    def learn(self, inverse: Matrix, step: Vector, change: Vector, image: Vector) -> None:
        """Learn a pair, and B times its step, in place: H₊ = (H − Hy(Hy)ᵀ/yᵀHy + φvvᵀ)/τ + ssᵀ/sᵀy.

        Here v = √(yᵀHy)(s/sᵀy − Hy/yᵀHy). All in one pass over H, which counts where its size is all that counts.
        """
        product = inverse @ change
        along, across, bent = step @ change, change @ product, step @ image
        if not min(along, across, bent) > 0:  # Which only rounding can do, after a search of Wolfe's.
            return
        share, scale = self.choice(bent / along, across / along, len(step))
        weights = np.array([-1 / (scale * across), share * across / scale, 1 / along])
        columns = np.stack([product, step / along - product / across, step], axis=1) * np.sqrt(np.abs(weights))
        left, right = torch.from_numpy(columns * np.sign(weights)), torch.from_numpy(columns)
        torch.from_numpy(inverse).addmm_(left, right.T, beta=1 / scale)

    def choice(self, b: float, h: float, size: int) -> Choice:
        """Return φ and τ from b = sᵀBs/sᵀy and h = yᵀHy/sᵀy."""
        return Choice(1.0, min(1.0, 1 / b))


@dataclass(frozen=True)
class SelfScaledBroyden(SelfScaledBFGS):
    """The same with the member of Broyden's family chosen each time, beyond BFGS and DFP if need be."""

    name = "ssbroyden"

    def choice(self, b: float, h: float, size: int) -> Choice:
        """Return φ and τ from b = sᵀBs/sᵀy and h = yᵀHy/sᵀy; bh ≥ 1, and where it is one φ does not matter."""
        a = max(b * h - 1, LEAST_SPREAD)
        rho = min(1.0, h * (1 - sqrt(a / (1 + a))))
        theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
        sigma = 1 + a * theta
        root = sigma ** (-1 / max(size - 1, 1))
        first = min(1.0, 1 / b)
        scale = first * min(root, 1 / theta) if theta > 0 else min(first * root, sigma)
        return Choice((1 - theta) / sigma, scale)


METHODS = (SelfScaledBFGS(), SelfScaledBroyden())

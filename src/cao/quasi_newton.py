"""The inverse Hessian of limited-memory BFGS: pairs of steps and gradient changes over an initial matrix."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SketchedInverse:
    """The matrix (B + ηI)⁻¹ of a sketch B = V diag(λ) Vᵀ with λ ≥ 0, its vectors as rows; without any it is I/η."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    damping: float

    def __matmul__(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the product: captured directions are scaled by 1/(λ + η), the complement by 1/η."""
        gains = (self.values / (self.values + self.damping)).to(vector)
        return (vector - self.vectors.T @ (gains * (self.vectors @ vector))) / self.damping


def fitted_damping(
    values: Float[Tensor, " k"],
    vectors: Float[Tensor, "k n"],
    steps: Float[Tensor, "m n"],
    changes: Float[Tensor, "m n"],
) -> float:
    """Return the η for which the sum over pairs of yᵀ(B + ηI)⁻¹y is that of sᵀy.

    So the sketch with its damping explains the pairs. Without a sketch this is yᵀy/sᵀy, the usual scaling of L-BFGS.
    The left side falls from infinity to zero as η grows, so there is one root, found by bisection of log η.
    """
    captured = (changes @ vectors.T).double().square().sum(dim=0)
    total = changes.double().square().sum()
    target = float((steps * changes).sum())
    # What the vectors leave of y; its rounding error must not make it vanish.
    rest = float((total - captured.sum()).clamp_min(torch.finfo(changes.dtype).eps * total))
    curvature = values.double()
    low, high = math.log(rest / target), math.log(float(total) / target)
    for _ in range(60):
        middle = math.exp((low + high) / 2)
        is_too_small = float((captured / (curvature + middle)).sum()) + rest / middle > target
        low, high = (math.log(middle), high) if is_too_small else (low, math.log(middle))
    return math.exp((low + high) / 2)


class Pairs:
    """The last pairs s, y of steps and gradient changes, in buffers of which the oldest row is overwritten.

    Their tensors are entries of a dict, the optimizer's state, so that they are saved with it.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.get("order", ()))

    def add(self, step: Float[Tensor, " n"], change: Float[Tensor, " n"], capacity: int) -> None:
        """Remember a pair, and forget the oldest if there is no room."""
        state = self._state
        if "steps" not in state:
            state["steps"], state["changes"] = step.new_zeros(2, capacity, len(step))
            state["products"] = step.new_zeros(capacity, capacity, dtype=torch.float64)
            state["order"] = []
        order = state["order"]
        slot = order.pop(0) if len(order) == capacity else len(order)
        order.append(slot)
        state["steps"][slot], state["changes"][slot] = step, change
        state["products"][:, slot] = state["steps"] @ change

    def clear(self) -> None:
        """Forget all pairs."""
        self._state["order"] = []

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the steps and the changes of the pairs added last, at most `count` of them."""
        slots = self._state["order"][-count:]
        return self._state["steps"][slots], self._state["changes"][slots]

    def inverse_hessian_product(self, gradient: Float[Tensor, " n"], initial: SketchedInverse) -> Float[Tensor, " n"]:
        """Return H g for the BFGS matrix H of the pairs over an initial matrix.

        This is the two-loop recursion with each loop written as a triangular system: with R the upper triangle of SᵀY,
        oldest first, and D its diagonal, Rα = Sᵀg, q = H₀(g − Yα), Rᵀβ = Dα − Yᵀq, and Hg = q + Sβ. A long history
        costs four passes over the buffers.
        """
        if not len(self):
            return initial @ gradient
        order = torch.tensor(self._state["order"], device=gradient.device)
        used = len(order)
        steps, changes = self._state["steps"][:used], self._state["changes"][:used]
        triangle = self._state["products"][order[:, None], order]
        alpha = solve_upper(triangle, (steps @ gradient)[order])
        product = initial @ (gradient - in_slots(alpha, order, changes))
        beta = solve_lower(triangle.T, triangle.diagonal() * alpha - (changes @ product)[order])
        return product + in_slots(beta, order, steps)


def solve_upper(triangle: Float[Tensor, "m m"], right: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Solve with the upper triangle of a matrix, in its precision."""
    return torch.linalg.solve_triangular(triangle, right.to(triangle)[:, None], upper=True)[:, 0]


def solve_lower(triangle: Float[Tensor, "m m"], right: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Solve with the lower triangle of a matrix, in its precision."""
    return torch.linalg.solve_triangular(triangle, right.to(triangle)[:, None], upper=False)[:, 0]


def in_slots(coefficients: Float[Tensor, " m"], order: Tensor, rows: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
    """Return the sum of rows, the coefficients given in the order of the pairs and not of the slots."""
    return rows.T @ torch.empty_like(coefficients).scatter_(0, order, coefficients).to(rows)

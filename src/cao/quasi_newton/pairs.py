"""A memory of pairs over a sketch: the inverse Hessian of limited-memory BFGS, and how it is applied."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import in_float64, precise
from cao.sketch.damped import Damped

# What the damping is fitted by: then a new pair is one read from the device.
ON_CPU = ("values", "explained")


class Pairs:
    """BFGS updates by the last pairs s, y of steps and gradient changes, over (B + ηI)⁻¹ of a sketch B = V diag(λ) Vᵀ.

    The damping η is fitted: the sum over the pairs since the last sketch of yᵀ(B + ηI)⁻¹y is that of sᵀy. So captured
    directions get their Newton step, and the rest is scaled as the pairs say. Without a sketch only the newest pair is
    asked, and η = yᵀy/sᵀy is the usual scaling of L-BFGS.

    Outside a complete sketch, one of as many vectors as there are parameters, there is nothing to scale: it is adopted
    with a damping of rounding size, and only pairs that contradict it raise that.

    All that it knows are entries of a dict, the optimizer's state, so that it is saved with it.
    """

    name = "pairs"

    def __init__(self, state: dict[str, Any], capacity: int = 100) -> None:
        self._state, self.capacity = state, capacity
        state.setdefault("order", [])

    @property
    def is_known(self) -> bool:
        """Whether there is anything to scale a gradient by."""
        return "damping" in self._state

    @property
    def damping(self) -> float:
        """The curvature η that stands in for whatever is neither in the sketch nor in the pairs."""
        return float(self._state["damping"])

    @damping.setter
    def damping(self, damping: float) -> None:
        self._state["damping"] = damping

    @property
    def values(self) -> Float[Tensor, " k"]:
        """The eigenvalues in the sketch, in float64, on the CPU."""
        values: Tensor = self._state.get("values", torch.zeros(0, dtype=torch.float64))
        return values

    @property
    def vectors(self) -> Float[Tensor, "k n"] | None:
        """The eigenvectors in the sketch, as rows."""
        return self._state.get("vectors")

    @property
    def is_complete(self) -> bool:
        """Whether the sketch spans all parameters."""
        return self.vectors is not None and self.vectors.shape[0] == self.vectors.shape[1]

    @property
    def has_learnt(self) -> bool:
        """Whether any pair is remembered."""
        return bool(self._state["order"])

    def adopt(self, values: Float[Tensor, " k"], vectors: Float[Tensor, "k n"]) -> None:
        """Begin anew with another sketch, at the damping there is until a pair tells better."""
        self._state["values"], self._state["vectors"] = in_float64(values), vectors
        self.forget()
        if self.is_complete and float(values.max()) > 0:
            # Below this share of the largest eigenvalue little but rounding is left of a gradient's components.
            regularization = torch.finfo(vectors.dtype).eps ** (2 / 3) * float(values.max())
            self.damping = min(self._state.get("damping", math.inf), regularization)

    def forget(self) -> None:
        """Forget the pairs and what they say about the damping."""
        self._state["order"] = []
        self._state.pop("explained", None)

    def learn(
        self, step: Float[Tensor, " n"], change: Float[Tensor, " n"], image: Float[Tensor, " n"] | None = None
    ) -> None:
        """Learn a pair, and forget the oldest if there is no room; one of negative curvature teaches nothing."""
        state, capacity, precision = self._state, self.capacity, torch.finfo(step.dtype).eps
        captured = change.new_zeros(0) if self.vectors is None else self.vectors @ change
        best = precise(step.device)
        sizes = torch.stack([step @ change, step.norm(), change.norm()])
        facts = in_float64(torch.cat([captured.to(best), sizes.to(best), change.to(best).square().sum()[None]]))
        target, step_norm, change_norm, total = facts[-4:].tolist()
        if not target > precision * step_norm * change_norm:
            return
        if "steps" not in state or len(state["steps"]) != capacity:
            self._make_room(step)
        order = state["order"]
        slot = order.pop(0) if len(order) == capacity else len(order)
        order.append(slot)
        state["steps"][slot], state["changes"][slot] = step, change
        state["products"][:, slot] = state["steps"] @ change
        if precision * total > 0:  # Else the change is too small to be squared.
            self._fit_damping(facts[:-4].square(), total, target, precision)

    def __matmul__(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the product with a gradient.

        This is the two-loop recursion with each loop written as a triangular system: with R the upper triangle of SᵀY,
        oldest first, and D its diagonal, Rα = Sᵀg, q = H₀(g − Yα), Rᵀβ = Dα − Yᵀq, and Hg = q + Sβ. A long history
        costs four passes over the buffers.
        """
        if not self._state["order"]:
            return self._initial(gradient) @ gradient
        order = torch.tensor(self._state["order"], device=gradient.device)
        steps, changes = self._state["steps"][: len(order)], self._state["changes"][: len(order)]
        triangle = self._state["products"][order[:, None], order]
        alpha = solve(triangle, (steps @ gradient)[order], upper=True)
        product = self._initial(gradient) @ (gradient - combine(changes, order, alpha))
        beta = solve(triangle.T, triangle.diagonal() * alpha - (changes @ product)[order], upper=False)
        return product + combine(steps, order, beta)

    def first_step(self, rate: float, slope: float, decrease: float) -> float:
        """Return the rate: the damping, fitted to all pairs, has made the direction as long as it should be."""
        return rate

    def dense(self) -> Float[Tensor, "n n"]:
        """Return the product with the identity: the whole matrix.

        Without the recursion, with S and Y as rows, A = R⁻¹S and G = YH₀, it is H₀ + Aᵀ(D + YGᵀ)A − AᵀG − GᵀA.
        """
        initial = self._initial(self._state["steps"][0]).dense()
        order = torch.tensor(self._state["order"], device=initial.device)
        steps, changes = self._state["steps"][order], self._state["changes"][order]
        triangle = self._state["products"][order[:, None], order].triu()
        solved: Tensor = torch.linalg.solve_triangular(triangle, steps.to(triangle), upper=True).to(steps)
        images = changes @ initial
        crossed = solved.T @ images
        middle = torch.diag(triangle.diagonal()).to(steps) + changes @ images.T
        whole: Tensor = initial + solved.T @ middle @ solved - crossed - crossed.T
        return (whole + whole.T) / 2  # Which rounding leaves slightly asymmetric.

    def _make_room(self, like: Float[Tensor, " n"]) -> None:
        """Make buffers for as many pairs as there is room for, and keep the newest of those that there are."""
        state, capacity = self._state, self.capacity
        old, kept = dict(state), state["order"][-capacity:]
        # Each is a buffer of its own: where a row begins in memory decides the last bits of a product with it, and a
        # buffer that is loaded begins where any does.
        state["steps"], state["changes"] = (like.new_zeros(capacity, len(like)) for _ in range(2))
        state["products"] = like.new_zeros(capacity, capacity, dtype=precise(like.device))
        state["order"] = list(range(len(kept)))
        if kept:
            state["steps"][: len(kept)], state["changes"][: len(kept)] = old["steps"][kept], old["changes"][kept]
            state["products"][: len(kept), : len(kept)] = old["products"][kept][:, kept]

    def _initial(self, like: Float[Tensor, " n"]) -> Damped:
        """Return H₀ = (B + ηI)⁻¹; I/η without a sketch."""
        rows = like.new_zeros(0, len(like)) if self.vectors is None else self.vectors
        return Damped.of(self.values, rows.T, self.damping)

    def _fit_damping(self, captured: Float[Tensor, " k"], total: float, target: float, precision: float) -> None:
        """Add what the newest pair says, and solve for η."""
        if self.vectors is None:
            self.damping = total / target
            return
        # What the vectors leave of y; rounding must not make it vanish.
        rest = max(total - float(captured.sum()), precision * total)
        newest = torch.cat([captured, captured.new_tensor([rest, target])])
        explained = self._state["explained"] = self._state.get("explained", 0) + newest
        self.damping = damping_that_explains(self.values, explained[:-2], *explained[-2:].tolist())


def damping_that_explains(
    values: Float[Tensor, " k"], captured: Float[Tensor, " k"], rest: float, target: float
) -> float:
    """Return the η with Σ captured/(λ + η) + rest/η = target.

    The left side falls as η grows, from above the target to below it over the interval that is divided here.
    """
    low, high = math.log(rest / target), math.log((rest + float(captured.sum())) / target)
    for _ in range(4):
        logs = torch.linspace(low, high, 101, dtype=torch.float64, device=values.device)
        dampings = logs.exp()
        explained = (captured / (values + dampings[:, None])).sum(dim=1) + rest / dampings
        place = min(max(int((explained > target).sum()), 1), 100)
        low, high = logs[place - 1 : place + 1].tolist()
    return math.exp(high)


def solve(triangle: Float[Tensor, "m m"], right: Float[Tensor, " m"], *, upper: bool) -> Float[Tensor, " m"]:
    """Solve with one triangle of a matrix, in its precision."""
    solution: Tensor = torch.linalg.solve_triangular(triangle, right.to(triangle)[:, None], upper=upper)
    return solution[:, 0]


def combine(rows: Float[Tensor, "m n"], order: Tensor, coefficients: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
    """Return the sum of rows, the coefficients given in the order of the pairs and not of the rows."""
    return rows.T @ torch.empty_like(coefficients).scatter_(0, order, coefficients).to(rows)

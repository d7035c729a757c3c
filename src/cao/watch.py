"""Sharpness: how close a training is to the edge at which its optimizer's steps become unstable."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from cao import advice
from cao.clock import Clock
from cao.curvature.hessian import LossFunction
from cao.curvature.operators import ParameterOperator, Scaled, Shifted
from cao.edges import EDGES, is_ready, known_as, metric_of
from cao.linalg.columns import HERE, Eigenpairs, Space, generator_for, small_eigh
from cao.linalg.eigensolvers import KrylovSpace
from cao.linalg.flat import FlatParams
from cao.readings import Reading, listener, picture
from cao.sketch.making import Group, check_request, shared_operator

# Vectors that a look keeps, besides the one that it starts from.
VECTORS = 3
# An optimizer's running means say little before so many gradients.
FIRST_GRADIENTS = 10
# A little of a random direction in every start leads out of a space that the curvature alone would never leave.
FRESH_SHARE = 0.01


class Sharpness:
    """Watches how close an optimizer is to the edge of stability, for a hundredth of the time.

    Call it before `loss.backward()`, at every step::

        watch = Sharpness(optimizer)

        loss = loss_function(model(inputs), targets)
        watch(loss)
        loss.backward()

    It looks at the curvature when there is time for it, and then returns a `Reading`, otherwise None. No gradient,
    parameter, buffer or random stream is touched. Each look starts from the eigenvector of the last, and takes one
    Hessian-vector product, or more if that has moved. Of an optimizer that adapts, the first look waits for ten steps.

    Args:
        optimizer: any of torch's. One whose edge is not known is watched too, but its ratio to the edge is NaN.
        every: steps between looks, at least.
        budget: the largest share of the time that looks may take; None sets no limit.
        tell: whom to tell of each reading: a function, a path (CSV, or JSON lines), a TensorBoard writer, a logger that
            has `.log`, or a list of these.
        like: the name of the torch optimizer whose steps yours takes with the same state, such as "AdamW".
        plain: whether to follow λ₁ of H, too, where the optimizer's metric is another one; False leaves it NaN, and
            saves half of a look.
        patience: steps with a ratio above 1 before a warning.
        max_products: the most products that a look may take for each eigenvector.
        tolerance: a look ends once the relative residual of its eigenpair is below this.
        process_group: processes that share one curvature, as for CAO; False for none.
        seed: seed of the first start vector.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 1,
        budget: float | None = 0.01,
        tell: Any = (),
        like: str | None = None,
        plain: bool = True,
        patience: int = 40,
        max_products: int = 8,
        tolerance: float = 0.2,
        process_group: dist.ProcessGroup | Literal[False] | None = None,
        seed: int = 0,
    ) -> None:
        self.optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it.
        check_settings(self.optimizer, every, budget, like, max_products)
        self.every, self.budget, self.plain, self.patience = every, budget, plain, patience
        self.listeners = [listener(each) for each in (tell if isinstance(tell, list | tuple) else [tell])]
        self.process_group: Group = process_group
        self.seed = seed
        self.readings: list[Reading] = []
        self.steps = 0
        """Steps that the optimizer has taken."""
        self._known_as = like or known_as(self.optimizer)
        self._most, self._tolerance = max_products, tolerance
        self._vectors: dict[str, Float[Tensor, "n 1"]] = {}
        self._clock = Clock(self._flat().device)
        self._next_look = 0
        self._steps_above = 0
        self._has_warned: list[str] = []
        self._is_on = True
        self._handle = self.optimizer.register_step_post_hook(self._after_step)
        if self._known_as is None:
            advice.warn_once("unknown", unknown(self.optimizer), self._has_warned)

    def __call__(
        self, source: Tensor | LossFunction | ParameterOperator, *, scale: float | Tensor = 1.0
    ) -> Reading | None:
        """Look at the curvature if it is time to, and return what was seen.

        Source and scale are those of `CAO.refresh_if_due`: a loss, a function that computes it, or an operator.
        """
        self._clock.begin()
        return self.look(source, scale=scale) if self.is_due else None

    @property
    def is_due(self) -> bool:
        """Whether the next call will look: at most once per step, and within the budget."""
        if not self._is_on or self.steps < self._next_look:
            return False
        return bool(self.readings) or is_ready(self.optimizer, self._known_as, FIRST_GRADIENTS)

    @property
    def ratio(self) -> float:
        """The last reading's ratio to the edge, at the present learning rate; NaN before the first reading."""
        if not self.readings:
            return math.nan
        last, rates = self.readings[-1], [group.get("lr") for group in self.optimizer.param_groups]
        # To read a rate on a device would make the host wait, at every step.
        if last.lr == 0 or any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
            return last.ratio
        return last.ratio * self._lr() / last.lr

    def look(self, source: Tensor | LossFunction | ParameterOperator, *, scale: float | Tensor = 1.0) -> Reading:
        """Look at the curvature now, whatever the budget."""
        with self._clock.looking():
            plain, felt, edge = self._seen(source, scale)
            products = felt.products + (0 if plain.vectors is felt.vectors else plain.products)
            value, sharpness = float(felt.values[0]), float(plain.values[0])
        reading = Reading(
            step=self.steps,
            sharpness=sharpness,
            preconditioned=value,
            edge=edge,
            ratio=value / edge,
            lr=self._lr(),
            residual=float(felt.residuals[0]) / abs(value) if value else 0.0,
            products=products,
            seconds=self._clock.latest,
            share=self._clock.share,
        )
        self._next_look = self.steps + self.every
        self.readings.append(reading)
        for tell in self.listeners:
            tell(reading)
        return reading

    @property
    def share(self) -> float:
        """The time of looks as a share of all time since the first call."""
        return self._clock.share

    def leave_out(self, seconds: float) -> None:
        """Take time that was no training's, such as an evaluation's, out of the account that looks are a share of."""
        self._clock.leave_out(seconds)

    def line(self) -> str:
        """Return the last reading as one line."""
        return str(self.readings[-1]) if self.readings else "no reading yet"

    def plot(self) -> Any:
        """Return a matplotlib figure of all readings: curvature, edge, ratio and learning rate."""
        return picture(self.readings)

    def remove(self) -> None:
        """Stop counting the optimizer's steps, and with it all looks."""
        self._handle.remove()
        self._is_on = False

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next look depends on, its vectors shaped like the parameters."""
        flat = self._flat()
        return {
            "steps": self.steps,
            "next_look": self._next_look,
            "steps_above": self._steps_above,
            "clock": self._clock.state(),
            "has_warned": list(self._has_warned),
            "readings": [tuple(reading) for reading in self.readings],
            "vectors": {name: flat.split(vector[:, 0], vector.dtype) for name, vector in self._vectors.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another watch of the same parameters was."""
        flat = self._flat()
        self.steps, self._next_look = state_dict["steps"], state_dict["next_look"]
        self._steps_above, self._has_warned = state_dict["steps_above"], list(state_dict["has_warned"])
        self._clock.load(state_dict["clock"])
        self.readings = [Reading(*numbers) for numbers in state_dict["readings"]]
        self._vectors = {name: flat.join(parts).unsqueeze(1) for name, parts in state_dict["vectors"].items()}

    def _flat(self) -> FlatParams:
        return FlatParams(p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)

    def _lr(self) -> float:
        return max(float(group.get("lr", math.nan)) for group in self.optimizer.param_groups)

    def _after_step(self, *_: Any) -> None:
        """Count a step, and warn; once the next look is near, put it off for as long as the budget asks for."""
        self.steps += 1
        self._steps_above = self._steps_above + 1 if self.ratio > 1 else 0
        if self._steps_above == self.patience:
            advice.warn_once("edge", above_the_edge(self.ratio, self._lr(), self.patience), self._has_warned)
        if self.steps >= self._next_look and self.budget is not None:
            self._next_look = self.steps + self._agreed(self._clock.wait(self.budget, self.steps))

    def _agreed(self, wait: int) -> int:
        """Return the longest wait of all processes, so that they look at the same steps."""
        if self.process_group is False or not (dist.is_available() and dist.is_initialized()):
            return wait
        longest = torch.tensor(wait, device=self._clock.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.process_group)
        return int(longest)

    def _seen(self, source: Any, scale: float | Tensor) -> tuple[Eigenpairs, Eigenpairs, float]:
        """Return the eigenpairs of H and of what the optimizer feels, and the edge of these."""
        flat, sign = self._flat(), -1 if self.optimizer.param_groups[0].get("maximize") else 1
        check_request(scale, flat, 1)
        metric = metric_of(self.optimizer, self._known_as, flat)
        operator = shared_operator(source, sign * float(scale), flat, self.process_group)
        if not isinstance(metric.diagonal, Tensor):
            plain = self._followed("plain", operator, flat)
            return plain, replace(plain, values=plain.values + metric.decay), metric.edge
        felt = self._followed("felt", Scaled(Shifted(operator, metric.decay), metric.diagonal), flat)
        plain = self._followed("plain", operator, flat) if self.plain else replace(felt, values=felt.values * math.nan)
        return plain, felt, metric.edge

    def _followed(self, name: str, operator: ParameterOperator, flat: FlatParams) -> Eigenpairs:
        """Return the top eigenpair, starting from the one of the last look, and keep a better start for the next."""
        generator = generator_for(flat.device, self.seed, self.steps)
        start = flat.space.random(flat.length, 1, generator, flat.dtype)
        if (last := self._vectors.pop(name, None)) is not None and len(last) == len(start):
            start = last + FRESH_SHARE / flat.space.norms(start) * start
        pairs, following = follow(operator, start, self._tolerance, self._most, flat.space)
        if pairs.is_finite(flat.space):
            self._vectors[name] = following
        return pairs


def follow(
    operator: ParameterOperator, start: Float[Tensor, "n 1"], tolerance: float, most: int, space: Space = HERE
) -> tuple[Eigenpairs, Float[Tensor, "n 1"]]:
    """Return the top eigenpair by Lanczos, and what one step of power iteration, without another product, makes of it.

    It ends with the product after which the relative residual is below the tolerance.
    """
    krylov = KrylovSpace(operator, start, VECTORS, space)
    while True:
        krylov.grow()
        values, rotation = small_eigh(krylov.projected, "algebraic")
        best, turn = values[:1], rotation[:, :1]
        residuals = krylov.residual_norms(turn)
        # Also false for NaN.
        if not bool(residuals > tolerance * best.abs()) or krylov.products >= most or krylov.is_exhausted:
            break
        if krylov.is_full:
            krylov.shrink(values[: VECTORS - 1], rotation[:, : VECTORS - 1])
    vector = krylov.combine(turn)
    following = vector * best.to(vector) + krylov.residual * turn[-1].to(vector)
    return Eigenpairs(best.to(vector), vector, residuals.to(vector), krylov.products), following / space.norms(
        following
    )


def check_settings(optimizer: object, every: int, budget: float | None, like: str | None, products: int) -> None:
    """Refuse impossible settings."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Sharpness needs an optimizer of torch, got {type(optimizer).__name__}")
    if every < 1 or products < 1:
        raise ValueError(f"every and max_products must be at least 1, got {every} and {products}")
    if budget is not None and not 0 < budget <= 1:
        raise ValueError(f"budget must be a share of the time, above 0 and at most 1, or None; got {budget}")
    if like is not None and like not in EDGES:
        raise ValueError(f"like must be one of {', '.join(EDGES)}, got {like!r}")


def unknown(optimizer: Optimizer) -> str:
    """Say that an optimizer's edge is not known."""
    return (
        f"the edge of stability of {type(optimizer).__name__} is not known, so that the plain Hessian is watched and "
        "the ratio is NaN. If its steps and state are those of an optimizer of torch, name it: "
        "Sharpness(optimizer, like='AdamW')"
    )


def above_the_edge(ratio: float, lr: float, steps: int) -> str:
    """Say that the sharpness has been above the edge of stability."""
    return (
        f"at this rate (lr {lr:.3g}) the sharpness has been above the edge of stability for {steps} steps, by a factor "
        f"of {ratio:.3g} now: the loss may oscillate or diverge. Divide lr by {ratio:.2g} or more, lengthen the "
        "warm-up, or use larger batches"
    )

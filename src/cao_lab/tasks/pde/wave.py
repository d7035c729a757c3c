"""Wave: two standing waves on a string, the fundamental and its fifth harmonic (Rathore et al. 2024)."""

from math import pi

import torch
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

SPEED = 2.0
HARMONIC = 5.0


def exact(x: Column, t: Column) -> Column:
    """Return sin(πx) cos(2πt) + ½ sin(5πx) cos(10πt)."""
    return standing(1.0, x, t) + 0.5 * standing(HARMONIC, x, t)


def standing(harmonic: float, x: Column, t: Column) -> Column:
    """Return a standing wave that starts at rest."""
    return torch.sin(harmonic * pi * x) * torch.cos(SPEED * harmonic * pi * t)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_tt − 4u_xx inside, the initial shape and velocity, and the values at both ends."""
    x, t = points.interior
    value = u(x, t)
    acceleration = derivative(derivative(value, t), t)
    bend = derivative(derivative(value, x), x)
    start = u(*points.bottom)
    return (
        acceleration - SPEED**2 * bend,
        start - exact(*points.bottom).detach(),
        derivative(start, points.bottom[1]),
        u(*points.left),
        u(*points.right),
    )


WAVE = Equation("wave", Rectangle((0, 1), (0, 1)), residuals, exact)

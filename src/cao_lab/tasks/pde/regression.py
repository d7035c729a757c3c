"""Plain regression of a wavy function of two variables: least squares without derivatives."""

from math import pi

import torch
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle
from cao_lab.tasks.pde.problem import Equation, Field


def wavy(x: Column, y: Column) -> Column:
    """Return sin(3πx) cos(2πy) + ½ sin(5πxy)."""
    return torch.sin(3 * pi * x) * torch.cos(2 * pi * y) + 0.5 * torch.sin(5 * pi * x * y)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return the misfit at the interior points."""
    x, y = (coordinate.detach() for coordinate in points.interior)
    return (u(x, y) - wavy(x, y),)


REGRESSION = Equation("regression", Rectangle((-1, 1), (-1, 1)), residuals, wavy)

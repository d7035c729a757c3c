"""The line search against Wolfe's conditions, on functions that are known to be hard, and on values without digits."""

import math
from collections.abc import Callable

import pytest

from cao.quasi_newton.line_search import HagerZhang, Point

Function = Callable[[float], tuple[float, float]]


def more_thuente_1(x: float, b: float = 2.0) -> tuple[float, float]:
    return -x / (x * x + b), (x * x - b) / (x * x + b) ** 2


def more_thuente_2(x: float, b: float = 0.004) -> tuple[float, float]:
    return (x + b) ** 5 - 2 * (x + b) ** 4, 5 * (x + b) ** 4 - 8 * (x + b) ** 3


def yanai(x: float, b1: float = 0.001, b2: float = 0.01) -> tuple[float, float]:
    """Function 4 to 6 of Moré and Thuente: two branches of very different curvature."""
    first, second = math.sqrt(1 + b1 * b1) - b1, math.sqrt(1 + b2 * b2) - b2
    left, right = math.hypot(1 - x, b2), math.hypot(x, b1)
    return first * left + second * right, first * (x - 1) / left + second * x / right


def wall(x: float) -> tuple[float, float]:
    """Minus x up to 1, where the function ends."""
    return (-x - math.log(1 - x) / 100, -1 + 0.01 / (1 - x)) if x < 1 else (math.nan, math.nan)


FUNCTIONS: list[Function] = [more_thuente_1, more_thuente_2, yanai, wall]


def run(function: Function, step: float, **settings: float) -> tuple[Point | None, list[float]]:
    visited: list[float] = []

    def evaluate(step: float) -> Point:
        visited.append(step)
        return Point(step, *function(step))

    search = HagerZhang(**settings)  # type: ignore[arg-type]
    return search(evaluate, Point(0.0, *function(0.0)), step), visited


@pytest.mark.parametrize("step", [1e-3, 1e-1, 1e1, 1e3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wolfe_conditions_hold_from_any_first_step(function: Function, step: float) -> None:
    found, visited = run(function, step)
    value, slope = function(0.0)
    assert found is not None
    assert found.slope >= 0.9 * slope
    assert found.value <= value + 0.1 * found.step * slope or found.slope <= -0.8 * slope
    assert len(visited) < 25


def test_the_minimum_of_a_parabola_takes_two_evaluations() -> None:
    found, visited = run(lambda x: ((x - 3) ** 2, 2 * (x - 3)), 100.0, curvature=1e-6)
    assert found is not None
    assert found.step == pytest.approx(3.0)
    assert len(visited) == 2


def test_slopes_lead_where_values_have_lost_their_digits() -> None:
    def rounded(x: float) -> tuple[float, float]:
        return 1.0, 1e-9 * (x - 1)

    found, visited = run(rounded, 1.7)
    assert found is not None
    assert 0.1 <= found.step <= 1.8
    assert len(visited) <= 2


def test_a_function_without_a_lower_point_gives_none_within_the_budget() -> None:
    found, visited = run(lambda x: (x, -1.0), 1.0)
    assert found is None
    assert len(visited) <= 25


def test_infinite_values_back_off() -> None:
    found, visited = run(lambda x: (-x, -1 + x) if x < 1e-6 else (math.inf, math.nan), 1.0)
    assert found is not None
    assert 0 < found.step < 1e-6
    assert visited[0] == 1.0

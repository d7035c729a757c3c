"""The suite of fits: its bill, its profiles, its reading of NIST's files, and a whole run of a small problem."""

import math

import numpy as np
import pytest
import torch

from cao_lab.fits.meter import Meter, Spent
from cao_lab.fits.methods import METHODS
from cao_lab.fits.problems import MODELS, FitProblem, of_numpy, of_torch, read_nist
from cao_lab.fits.profiles import bills, profile_figure, share, table, worst_ratio
from cao_lab.fits.running import Result, boxed, digits, read, solved, write

FILE = """
Model:         Exponential Class
               y = b1*(1-exp[-b2*x])  +  e

          Starting values                  Certified Values
        Start 1     Start 2           Parameter     Standard Deviation
  b1 =   500         250           2.5E+02  2.7070075241E+00
  b2 =     0.0001      0.0005      5.5E-04  7.2668688436E-06

Data:          1 Response Variable  (y = volume)

Data:   y               x
      10.07E0      77.6E0
      14.73E0     114.9E0
"""


def curve() -> FitProblem:
    x = torch.linspace(0, 3, 20, dtype=torch.float64)
    target = 2 * torch.exp(-1.5 * x) + 0.1 * torch.sin(9 * x)
    return of_torch("own", "curve", np.array([1.0, 1.0]), lambda b: b[0] * torch.exp(-b[1] * x) - target, None)


def result(problem: str, method: str, trace: list[tuple[int, float]]) -> Result:
    lowest = min(loss for _, loss in trace)
    return Result("own", problem, method, 1, trace[0][1], lowest, math.nan, trace[-1][0], 0.1, "stopped", trace)


def test_a_file_of_nists_is_read():
    starts, certified, table = read_nist(FILE)
    assert starts.tolist() == [[500, 0.0001], [250, 0.0005]]
    assert certified.tolist() == [250, 0.00055]
    assert table.tolist() == [[10.07, 77.6], [14.73, 114.9]]


def test_there_are_27_models():
    assert len(MODELS) == 27


def test_complex_steps_are_taken_only_where_they_are_right():
    start = np.array([1.2, -0.7])
    smooth = of_numpy("own", "smooth", start, lambda x: np.array([np.exp(x[0]) * x[1], np.sin(x[1])]))
    exact = [[np.exp(1.2) * -0.7, np.exp(1.2)], [0, np.cos(-0.7)]]
    np.testing.assert_allclose(smooth.jacobian(start), exact, rtol=1e-14)
    kinked = of_numpy("own", "kinked", start, lambda x: np.array([abs(x[0]) + x[1], abs(x[1])]))
    np.testing.assert_allclose(kinked.jacobian(start), [[1, 1], [0, -1]], rtol=1e-8)


def test_the_bill_counts_what_is_new_and_ends_with_the_budget():
    meter = Meter(curve())
    meter.residuals(np.array([1.0, 1.0]))
    meter.residuals(np.array([1.0, 1.0]))
    meter.jacobian(np.array([1.0, 1.0]))
    assert (meter.bill, len(meter.trace)) == (1 + 2, 1)
    p = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    meter.tensor(p).square().sum().backward()
    assert meter.bill == 2 * (1 + 2)
    expected = 2 * curve().jacobian(np.array([2.0, 1.0])).T @ curve().residuals(np.array([2.0, 1.0]))
    np.testing.assert_allclose(p.grad, expected)

    def spend() -> None:
        for number in range(10_000):
            meter.residuals(np.array([1.0, number]))

    with pytest.raises(Spent):
        spend()
    assert meter.bill == 200 * 3


@pytest.mark.parametrize("name", ["cao.fit", "scipy trf", "scipy dogbox, scaled", "scipy lm", "torch L-BFGS"])
def test_methods_come_to_the_same_minimum(name):
    method, problem = METHODS[name], curve()
    best = solved(problem, "scipy trf", METHODS["scipy trf"]).lowest
    assert solved(problem, name, method).lowest == pytest.approx(best, rel=1e-10)
    if method.takes_bounds:
        found = solved(boxed(problem), name, method)
        assert found.lowest == pytest.approx(solved(boxed(problem), "scipy trf", METHODS["scipy trf"]).lowest)


def test_a_profile_is_the_share_of_problems_that_is_solved_within_a_budget():
    results = [
        result("a", "cao.fit", [(1, 100.0), (4, 0.01)]),
        result("a", "other", [(1, 100.0), (20, 0.0)]),
        result("b", "cao.fit", [(1, 1.0), (6, 0.5)]),
        result("b", "other", [(1, 1.0), (2, 0.0)]),
    ]
    found = bills(results, 1e-3)
    assert found == {"cao.fit": [2.0, math.inf], "other": [10.0, 1.0]}
    assert share(found["other"], 5) == 0.5
    assert worst_ratio(found) == (0.0, 1.0)
    assert "| other | 2 2 |" in table(results)
    assert len(profile_figure(results).axes) == 3


def test_results_are_written_and_read_back(tmp_path):
    results = [solved(curve(), "scipy trf", METHODS["scipy trf"])]
    write(tmp_path / "own.csv", results)
    (back,) = read(tmp_path)
    assert (back.suite, back.problem, back.bill) == ("own", "curve", results[0].bill)
    assert back.trace[-1][1] == pytest.approx(results[0].lowest)
    assert bills([back], 1e-3) == bills(results, 1e-3)


def test_digits_are_those_of_the_worst_parameter():
    assert digits(np.array([1.0, 2.002]), np.array([1.0, 2.0])) == pytest.approx(3)
    assert digits(np.array([1.0]), np.array([1.0])) == 11

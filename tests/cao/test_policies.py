import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from small_models import Quadratic, descend

from cao import CAO, Every, Fixed, FromSpectrum, Lanczos, SubspaceIteration
from cao.eigensolvers import SOLVERS, SolverName
from cao.linalg import Eigenpairs
from cao.policies.damping import DAMPINGS, DampingName
from cao.policies.rank import RANKS, RankName
from cao.policies.refresh import REFRESHES, Look, RefreshName, Track
from cao.saving import plain, restored


@pytest.mark.parametrize(
    ("shorthand", "values"),
    [
        ({"damping": 0.3}, {"damping": Fixed(0.3)}),
        ({"damping": "auto"}, {"damping": FromSpectrum()}),
        ({"refresh_every": 2}, {"refresh_every": Every(2)}),
        ({"eigensolver": "lanczos", "power_iterations": 4}, {"eigensolver": Lanczos(4)}),
        ({"power_iterations": 2, "tolerance": 0.1}, {"eigensolver": SubspaceIteration(2, 0.1)}),
    ],
)
def test_a_shorthand_takes_the_steps_of_what_it_stands_for(shorthand, values):
    ends = []
    for settings in (shorthand, values):
        problem = Quadratic()
        ends.append(descend(problem, CAO.paper(problem.params, 0.02, rank=2, **settings), 5))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("names", "words"),
    [(DampingName, DAMPINGS), (RankName, RANKS), (RefreshName, REFRESHES), (SolverName, SOLVERS)],
)
def test_a_type_checker_knows_every_word_for_a_rule(names, words):
    assert get_args(names) == tuple(words)


def test_policies_are_saved_as_plain_data_and_come_back():
    problem, other = Quadratic(), Quadratic()
    settings = {"damping": FromSpectrum(products=2), "refresh_every": Every(3), "eigensolver": Lanczos(2)}
    optimizer = CAO.paper(problem.params, 0.1, rank=2, **settings)
    descend(problem, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = CAO.paper(other.params, 0.5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert {name: resumed.param_groups[0][name] for name in settings} == settings


@dataclass(frozen=True)
class Late:
    """A rule of a user's own: refresh at every third step."""

    def heed(self, track: Track, gradient_norm: Callable[[], float]) -> None:
        pass

    def is_due(self, track: Track) -> bool:
        return track.age >= 3

    def wants_refresh(self, track: Track, look: Callable[[], Look]) -> bool:
        return True

    def is_overdue(self, track: Track) -> bool:
        return False


def test_a_rule_of_a_users_own_needs_no_change_to_the_library():
    problem = Quadratic()
    optimizer = CAO.paper(problem.params, 1e-3, refresh_every=Late())
    descend(problem, optimizer, 9)
    assert optimizer.counters.refreshes == 3


def test_an_unknown_policy_in_a_state_dict_is_named():
    with pytest.raises(ValueError, match="names the policy 'Clairvoyant', which this version does not have"):
        restored({"policy": "Clairvoyant"})
    assert plain(0.3) == restored(0.3) == 0.3


@pytest.mark.parametrize("rank", [1, 3])
def test_automatic_damping_measures_the_curvature_that_the_sketch_has_missed(rank):
    matrix = torch.diag(torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], dtype=torch.float64))
    solve = Lanczos(30)
    exact = solve(matrix, torch.ones(6, rank, dtype=torch.float64) + torch.eye(6, rank, dtype=torch.float64))
    wrong = torch.eye(6, dtype=torch.float64)[:, -rank:]
    pairs = type(exact)(torch.full((rank,), 1e-3).double(), wrong, torch.zeros(rank).double())
    damping, products = FromSpectrum(products=5).at_refresh(pairs, rank, matrix, weight_decay=0.5)
    assert damping == pytest.approx(9.5, rel=0.05)
    assert 1 <= products <= 5


def test_automatic_damping_is_stable_at_a_rate_of_1_though_all_residuals_point_one_way():
    # Four Ritz pairs of 0.01, each with a residual of 1 along the same direction, which has a curvature of 1 itself.
    hessian = 0.01 * torch.eye(5, dtype=torch.float64)
    hessian[4], hessian[:, 4] = 1.0, 1.0
    vectors, values = torch.eye(5, 4, dtype=torch.float64), torch.full((4,), 0.01, dtype=torch.float64)
    residuals = (hessian @ vectors - vectors * values).norm(dim=0)
    damping, _ = FromSpectrum().at_refresh(Eigenpairs(values, vectors, residuals), 4, hessian, weight_decay=0.0)
    inverse = torch.linalg.inv(vectors @ torch.diag(values) @ vectors.T + damping * torch.eye(5, dtype=torch.float64))
    assert torch.linalg.eigvals(inverse @ hessian).abs().max() < 2

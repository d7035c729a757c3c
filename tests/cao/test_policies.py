import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from small_models import Quadratic, descend, fixed
from torch import Tensor

from cao import AtTheEdge, Eigenpairs, Every, Fixed, Lanczos, SubspaceIteration
from cao.linalg.eigensolvers import SOLVERS, SolverName, SymmetricOperator, solved
from cao.linalg.flat import SpreadSpace
from cao.rules.damping import DAMPINGS, DampingName
from cao.rules.rank import RANKS, RankName
from cao.rules.refresh import REFRESHES, Look, RefreshName, Track
from cao.state import plain, restored


@pytest.mark.parametrize(
    ("shorthand", "values"),
    [
        ({"damping": 0.3}, {"damping": Fixed(0.3)}),
        ({"damping": "auto"}, {"damping": AtTheEdge()}),
        ({"refresh_every": 2}, {"refresh_every": Every(2)}),
        ({"eigensolver": "lanczos", "power_iterations": 4}, {"eigensolver": Lanczos(4)}),
        ({"power_iterations": 2}, {"eigensolver": SubspaceIteration(2)}),
    ],
)
def test_a_shorthand_takes_the_steps_of_what_it_stands_for(shorthand, values):
    ends = []
    for settings in (shorthand, values):
        problem = Quadratic()
        ends.append(descend(problem, fixed(problem.params, 0.02, rank=2, **settings), 5))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("names", "words"),
    [(DampingName, DAMPINGS), (RankName, RANKS), (RefreshName, REFRESHES), (SolverName, SOLVERS)],
)
def test_a_type_checker_knows_every_word_for_a_rule(names, words):
    assert get_args(names) == tuple(words)


def test_policies_are_saved_as_plain_data_and_come_back():
    problem, other = Quadratic(), Quadratic()
    settings = {"damping": AtTheEdge(safety=0.25), "refresh_every": Every(3), "eigensolver": Lanczos(2)}
    optimizer = fixed(problem.params, 0.1, rank=2, **settings)
    descend(problem, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = fixed(other.params, 0.5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert {name: resumed.param_groups[0][name] for name in settings} == settings


def of_a_user(operator: SymmetricOperator, start: Tensor, *, overwrite_start: bool = False) -> Eigenpairs:
    """Find eigenpairs as a solver that knows no space."""
    return Lanczos(3)(operator, start)


def test_a_solver_that_takes_no_space_serves_one_process_and_is_refused_where_parameters_are_spread():
    ends = []
    for solver in (of_a_user, Lanczos(3)):
        problem = Quadratic()
        ends.append(descend(problem, fixed(problem.params, 0.02, rank=2, eigensolver=solver), 5))
    assert torch.equal(*ends)
    with pytest.raises(ValueError, match="need an eigensolver that takes space=, got <function of_a_user"):
        solved(of_a_user, torch.eye(3), torch.ones(3, 1), SpreadSpace([], mesh="two processes"))


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
    optimizer = fixed(problem.params, 1e-3, refresh_every=Late())
    descend(problem, optimizer, 9)
    assert optimizer.counters.refreshes == 3


def test_an_unknown_policy_in_a_state_dict_is_named():
    with pytest.raises(ValueError, match="names the policy 'Clairvoyant', which this version does not have"):
        restored({"policy": "Clairvoyant"})
    assert plain(0.3) == restored(0.3) == 0.3

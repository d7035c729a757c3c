import io
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, get_args

import pytest
import torch
from small_models import Quadratic, descend, fixed
from torch import Tensor

from cao import CAO, AtTheEdge, Eigenpairs, Every, Fixed, Lanczos, SketchedLBFGS, SubspaceIteration
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

    def heed(self, state: Any, track: Track, gradient_norm: Callable[[], float]) -> Any:
        return state

    def is_due(self, state: Any, track: Track) -> bool:
        return track.age >= 3

    def wants_refresh(self, state: Any, track: Track, look: Callable[[], Look]) -> tuple[bool, Any]:
        return True, state

    def is_overdue(self, state: Any, track: Track) -> bool:
        return False


def test_a_rule_of_a_users_own_needs_no_change_to_the_library():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=Late())
    descend(problem, optimizer, 9)
    assert optimizer.counters.refreshes == 3


@dataclass(frozen=True)
class Patient(Late):
    """A rule of a user's own with a state: each interval is a step longer than the one before."""

    first: int = 1

    def is_due(self, state: dict[str, list[int]] | None, track: Track) -> bool:
        return track.age >= self.first + len(state["seen"] if state else [])

    def wants_refresh(self, state, track: Track, look: Callable[[], Look]) -> tuple[bool, dict[str, list[int]]]:
        return True, {"seen": [*(state["seen"] if state else []), track.steps]}


@dataclass(frozen=True)
class Rising(Fixed):
    """A damping of a user's own with a state: it doubles at every refresh."""

    def at_refresh(self, state, pairs, kept, size, weight_decay) -> list[float]:
        return [2 * (state or [self.value])[0]]

    def at_step(self, state, pace) -> tuple[float, float]:
        return (state or [self.value])[0], 1.0


def through_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what comes back of a state dict that went through a file."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_rules_of_a_users_own_resume_with_their_states(stop):
    rules = {"refresh_every": Patient(), "damping": Rising(0.1), "eigensolver": of_a_user}
    whole = Quadratic()
    optimizer = fixed(whole.params, 1e-3, rank=2, **rules)
    descend(whole, optimizer, 14)
    assert (optimizer.counters.refreshes, optimizer.sketch.damping) == (5, pytest.approx(0.1 * 2**5))
    problem = Quadratic()
    first = fixed(problem.params, 1e-3, rank=2, **rules)
    descend(problem, first, stop)
    saved = through_file(first.state_dict())
    resumed = fixed(problem.params, 1.0, **rules)
    resumed.load_state_dict(saved)
    descend(problem, resumed, 14 - stop)
    assert torch.equal(problem.theta, whole.theta)
    assert resumed.counters == optimizer.counters


def test_a_state_with_a_users_own_rule_needs_an_optimizer_that_has_it():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=Patient())
    descend(problem, optimizer, 3)
    with pytest.raises(ValueError, match="names the policy 'Patient', which is not one of ours; if it is one of your"):
        fixed(problem.params, 1e-3).load_state_dict(through_file(optimizer.state_dict()))


def test_a_question_changes_no_rule_and_no_state():
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1)
    descend(problem, optimizer, 5)
    before = str(optimizer.state_dict())
    for _ in range(3):
        assert optimizer.is_refresh_due in (True, False)
        str(optimizer.report())
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("own", [50.0, Rising(50.0)])
def test_a_damping_that_sets_itself_takes_nothing_over_from_another_rule(own):
    """Of six sharp directions one is captured: after the next refresh the damping is that of a run of its own."""
    dampings = []
    for damping in (own, "auto"):
        problem = Quadratic((90.0, 80.0, 70.0, 60.0, 50.0, 40.0))
        optimizer = CAO(problem.params, 1e-3, rank=1, refresh_every=100, damping=damping, scaling="unit")
        optimizer.refresh(problem.loss())
        optimizer.param_groups[0].update(damping="auto", lr=0.1)
        before = optimizer.sketch.damping
        optimizer.refresh(problem.loss())
        dampings.append((before, optimizer.sketch.damping))
    (switched, after), (_, alone) = dampings
    assert switched == 1 / 0.1
    assert after == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize(("rule", "other"), [(5, "auto"), ("auto", 5), (Patient(), "auto")])
def test_another_rule_may_take_over_in_the_middle_of_a_run(rule, other):
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.01, refresh_every=rule)
    descend(problem, optimizer, 8)
    optimizer.param_groups[0]["refresh_every"] = other
    before = optimizer.counters
    descend(problem, optimizer, 8)
    after = optimizer.counters
    assert after.refreshes + after.looks > before.refreshes + before.looks


def test_an_unknown_policy_in_a_state_dict_is_named():
    with pytest.raises(ValueError, match="names the policy 'Clairvoyant', which is not one of ours"):
        restored({"policy": "Clairvoyant"})
    assert plain(0.3) == restored(0.3) == 0.3


@pytest.mark.parametrize("optimizer", [CAO, SketchedLBFGS])
def test_auto_is_the_default_of_every_setting_that_takes_it(optimizer):
    taking = {name: each for name, each in signature(optimizer).parameters.items() if takes_auto(each.annotation)}
    assert len(taking) >= 3
    assert {each.default for each in taking.values()} == {"auto"}


def takes_auto(annotation: Any) -> bool:
    """Whether the word "auto" is among what an annotation allows."""
    return "auto" in get_args(annotation) or any(map(takes_auto, get_args(annotation)))

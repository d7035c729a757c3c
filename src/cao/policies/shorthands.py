"""The words and numbers that stand for rules, and how a state dict names rules."""

from dataclasses import asdict, is_dataclass
from typing import Any

from cao import eigensolvers, metric
from cao.eigensolvers import SOLVERS, Solver
from cao.policies import damping, rank, refresh
from cao.policies.damping import DAMPINGS, Damping, Fixed
from cao.policies.rank import RANKS, Exactly, Rank
from cao.policies.refresh import REFRESHES, Every, Refresh

SAVED: dict[str, Any] = {
    name: each
    for module in (damping, rank, refresh, eigensolvers, metric)
    for name, each in vars(module).items()
    if is_dataclass(each) and isinstance(each, type) and each.__module__ == module.__name__
}
"""What a state dict can name: all rules of ours. One of a user's own is not saved, and stays as it was constructed."""


def damping_policy(setting: float | str | Damping) -> Damping:
    """Return the damping that a number, a word or a policy stands for."""
    if isinstance(setting, str):
        return DAMPINGS[setting]
    return setting if isinstance(setting, Damping) else Fixed(float(setting))


def rank_policy(setting: int | str | Rank) -> Rank:
    """Return the rule that a rank, a word or a policy stands for."""
    if isinstance(setting, str):
        return RANKS[setting]
    return setting if isinstance(setting, Rank) else Exactly(int(setting))


def refresh_policy(setting: int | str | Refresh) -> Refresh:
    """Return the rule that an interval, a word or a policy stands for."""
    if isinstance(setting, str):
        return REFRESHES[setting]
    return setting if isinstance(setting, Refresh) else Every(int(setting))


def eigensolver_for(setting: str | Solver, iterations: int, tolerance: float | None) -> Solver:
    """Return the solver that a word, with its iterations and tolerance, or a solver stands for."""
    return SOLVERS[setting](iterations, tolerance) if isinstance(setting, str) else setting


def plain(setting: Any) -> Any:
    """Return a setting as plain data for a state dict: a policy becomes its name and its fields."""
    if type(setting) in SAVED.values():
        return {"policy": type(setting).__name__, **asdict(setting)}
    return setting


def restored(setting: Any) -> Any:
    """Return the setting that `plain` made plain data of."""
    if not isinstance(setting, dict) or "policy" not in setting:
        return setting
    fields = {name: value for name, value in setting.items() if name != "policy"}
    if setting["policy"] not in SAVED:
        raise ValueError(f"the state dict names the policy {setting['policy']!r}, which this version does not have")
    return SAVED[setting["policy"]](**fields)

import builtins
import itertools

import torch
from small_models import Quadratic
from torch import Tensor

from cao import CAO


def start_columns(seed: int, attempts: int = 2) -> list[Tensor]:
    """Return the subspaces that cold refreshes start from, as the sketch that no iteration has changed."""
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1, rank=1, power_iterations=0, warm_start=False, seed=seed)
    starts = []
    for _ in range(attempts):
        optimizer.refresh(problem.loss())
        starts.append(optimizer.sketch.vectors)
    return starts


def test_no_two_pairs_of_seed_and_refresh_start_alike():
    seeds = (-2, -1, 0, 1, 2, 2**32, 2**63, 2**64, 2**80)
    starts = [start for seed in seeds for start in start_columns(seed)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(starts, 2))


def test_the_start_does_not_depend_on_the_interpreters_hash(monkeypatch):
    expected = start_columns(3)
    original = builtins.hash
    monkeypatch.setattr(builtins, "hash", lambda value: original(value) ^ 0x5555)
    found = start_columns(3)
    monkeypatch.undo()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

"""Whether replicas hold the same parameters is asked at refreshes, not at every look, and what there is once."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_models import Quadratic, step_on

from cao import CAO
from cao.sketch import making


def test_parameters_are_summed_at_refreshes_and_models_are_looked_for_once_and_not_at_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sums, searches = [], []
    check, search = making.check_replicas, gc.get_objects
    monkeypatch.setattr(making, "check_replicas", lambda *arguments: (sums.append(1), check(*arguments)))
    monkeypatch.setattr(gc, "get_objects", lambda: (searches.append(1), search())[1])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        problem = Quadratic()
        optimizer = CAO(problem.params, 0.05)
        for _ in range(20):
            step_on(problem.loss(), optimizer)
    finally:
        dist.destroy_process_group()
    assert optimizer.counters.looks > 1
    assert len(sums) == optimizer.counters.refreshes
    assert len(searches) == 1

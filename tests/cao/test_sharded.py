from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from sharded_ranks import KINDS, SETTINGS, data_of, deep_network, end_of, optimizer_for, run_rank, train


@pytest.fixture(scope="module", params=list(KINDS))
def ends(request, tmp_path_factory) -> tuple[int, list[dict]]:
    """What two processes, and then four, came to with sharded parameters."""
    directory, world = str(tmp_path_factory.mktemp("ranks")), request.param
    mp.spawn(run_rank, (world, directory), nprocs=world)
    return world, [torch.load(Path(directory) / f"rank{rank}") for rank in range(world)]


def alone(name: str, source: str = "function"):
    """Train in this process, on the joined batches."""
    model = deep_network()
    optimizer = optimizer_for(model, name)
    train(model, optimizer, data_of(0, 1), source)
    return end_of(model, optimizer)


@pytest.mark.parametrize("name", SETTINGS)
def test_sharded_processes_take_the_steps_of_one_on_the_joined_batch(ends, name):
    world, found = ends
    params, values, counters = alone(name)
    for kind in KINDS[world]:
        for end in found:
            torch.testing.assert_close(end[kind, name][0], params, rtol=1e-7, atol=1e-9)
            assert end[kind, name][1] == pytest.approx(values, rel=1e-6)
            assert end[kind, name][2] == counters

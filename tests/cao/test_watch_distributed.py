import pytest
import torch
import torch.multiprocessing as mp
from watch_ranks import EXACT, WORLD, network, optimizer_for, readings_of, run_rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    directory = str(tmp_path_factory.mktemp("watch"))
    mp.spawn(run_rank, (directory,), nprocs=WORLD)
    return [torch.load(f"{directory}/{rank}") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["ddp loss", "ddp function", "fsdp function"])
def test_two_processes_see_what_one_sees_of_the_joined_batch(ranks, name):
    model = network()
    expected = readings_of(model, optimizer_for(model), slice(None), "loss", **EXACT)
    for rank in ranks:
        assert len(rank[name]) == len(expected)
        for seen, reading in zip(rank[name], expected, strict=True):
            assert seen[:6] == pytest.approx(tuple(reading)[:6], rel=1e-5)


def test_processes_look_at_the_same_steps_although_their_clocks_differ(ranks):
    steps = [[reading[0] for reading in rank["budget"]] for rank in ranks]
    assert steps[0] == steps[1]
    assert len(steps[0]) > 1

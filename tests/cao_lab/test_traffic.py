from collections import Counter

import pytest
import torch
import torch.multiprocessing as mp
from traffic_ranks import RANK, WORLD, run_rank
from traffic_table import (
    Collectives,
    bytes_sent,
    latencies,
    replicated_refresh,
    sgd_step,
    sharded_refresh,
    sharded_step,
)


@pytest.fixture(scope="module")
def sent(tmp_path_factory) -> dict:
    """What a process has sent, among two and among four."""
    directory = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(run_rank, (directory,), nprocs=WORLD)
    return torch.load(f"{directory}/rank0", weights_only=False)


def sizes(traffic) -> Counter:
    """Return how many collectives there are of each kind and size."""
    found: Counter = Counter()
    for each in traffic:
        found[each.kind, each.size] += each.count
    return found


LAYERS = (16 * 32 + 32, 32 * 8 + 8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_replicated_refresh_sends_what_the_formula_says_and_a_step_nothing(sent, ranks):
    refresh, step = sent["replicated", ranks]
    assert sizes(refresh) == sizes(replicated_refresh(sum(LAYERS), RANK))
    assert step == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_refresh_and_its_steps_send_what_the_formula_says(sent, ranks):
    refresh, step = sent["sharded", ranks]
    wanted = sizes(sharded_refresh(LAYERS[0], RANK))
    wanted += Counter({key: n for key, n in sizes(sharded_refresh(LAYERS[1], RANK)).items() if key[0] != "all_reduce"})
    assert sizes(refresh) == wanted
    assert sizes(step) == sizes(sharded_step(RANK))


def test_a_ring_sends_an_all_reduce_twice_and_a_tree_climbs_and_descends():
    gradient = sgd_step(10, is_sharded=False)
    assert bytes_sent(gradient, 4) == 2 * 40 * 3 / 4
    assert latencies([Collectives("all_reduce", 8)], 8) == 6
    assert latencies([Collectives("all_gather", 8)], 8) == 3

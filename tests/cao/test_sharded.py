from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_ranks import CASES, STEPS, data_of, deep_network, end_of, load, optimizer_for, run_rank, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cao import Hessian, LeastSquares, SketchedLBFGS, top_eigenpairs
from cao.linalg import flat


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


def run_ranks(world: int, directory: Path, checkpoint: Path) -> list[dict]:
    mp.spawn(run_rank, (world, str(directory), str(checkpoint)), nprocs=world)
    return [torch.load(directory / f"rank{rank}") for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory, checkpoint) -> list[dict]:
    """What two processes came to with sharded parameters; they leave a checkpoint."""
    return run_ranks(2, tmp_path_factory.mktemp("two"), checkpoint)


@pytest.fixture(scope="module")
def four(tmp_path_factory, checkpoint, two) -> list[dict]:
    """What four processes came to; they go on from that checkpoint."""
    return run_ranks(4, tmp_path_factory.mktemp("four"), checkpoint)


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for world, ranks in ((2, "two"), (4, "four")) for case in CASES[world]]
)
def test_sharded_processes_take_the_steps_of_one_on_the_joined_batch(request, ranks, case):
    _, name, source = case
    model = deep_network()
    optimizer = optimizer_for(model, name)
    train(model, optimizer, data_of(0, 1), source)
    params, values, counters = end_of(model, optimizer)
    for end in request.getfixturevalue(ranks):
        torch.testing.assert_close(end[case][0], params, rtol=1e-7, atol=1e-9)
        assert end[case][1] == pytest.approx(values, rel=1e-6)
        assert end[case][2] == counters


def test_without_a_sketch_sharded_steps_are_those_of_torch_to_the_bit(two):
    for end in two:
        assert torch.equal(end["fully sharded", "rank 0", "function"][0], end["SGD"])


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("settings", ["momentum", "at the edge"])
def test_a_checkpoint_of_two_processes_goes_on_in_one_and_in_four(two, four, checkpoint, settings):
    model = deep_network()
    optimizer = optimizer_for(model, settings)
    load(model, optimizer, str(checkpoint / settings))
    train(model, optimizer, data_of(0, 1, first=STEPS))
    here = end_of(model, optimizer)
    assert here[2][1] == 3  # Refreshes: the count went on, and there was another.
    for end in (*two, *four):
        params, values, counters = end["continued", settings]
        torch.testing.assert_close(params, here[0], rtol=1e-8, atol=1e-10)
        assert values == pytest.approx(here[1], rel=1e-7)
        assert counters == here[2]


def test_each_process_keeps_its_part_of_the_vectors_and_of_momentum_and_no_more(two, four):
    size, vectors = sum(p.numel() for p in deep_network().parameters()), 3
    for found in (two, four):
        assert sum(end["held"] for end in found) == size * (vectors + 1)
        # A shard is at most one row longer than a fair share of each of the four layers.
        assert max(end["held"] for end in found) <= (size / len(found) + 4 * 6) * (vectors + 1)


def test_processes_that_hold_different_shards_are_not_averaged(two, four):
    for end in (*two, *four):
        assert "process_group has processes that hold different shards" in end["refused group"]


def test_a_loss_whose_graph_does_not_reach_the_shards_is_refused(two, four):
    for end in (*two, *four):
        assert "pass a function that returns the loss" in end["refused loss"]


def test_the_vectors_of_a_sketch_are_those_that_it_can_be_given_back(four):
    assert all(end["given"] < 1e-14 for end in four)


def test_directions_without_curvature_are_orthonormal_and_the_same_in_all_replicas(four):
    for end in four:
        values, gram, difference = end["vanishing"]
        assert values[2:] == pytest.approx([0.0] * 3, abs=1e-12)
        torch.testing.assert_close(gram, torch.eye(5).double(), rtol=0, atol=1e-12)
        assert difference <= 1e-12


@pytest.mark.usefixtures("gloo")
def test_what_needs_whole_parameters_refuses_shards_by_name():
    param = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    for attempt, name in (
        (lambda: SketchedLBFGS([param]), "SketchedLBFGS"),
        (lambda: LeastSquares(lambda: param, [param]), "LeastSquares"),
        (lambda: top_eigenpairs(Hessian(param.sum, [param]), 1), "the spectrum of an operator"),
    ):
        with pytest.raises(ValueError, match=rf"{name} does not support sharded parameters .DTensor.; use"):
            attempt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, 16, 250, 257, 1031])
def test_numbers_drawn_in_pieces_are_those_drawn_at_once(monkeypatch, count, dtype):
    monkeypatch.setattr(flat, "DRAWN_AT_ONCE", 64)
    stream = flat.NormalStream(count, torch.Generator().manual_seed(3), dtype)
    drawn = torch.cat([stream.take(2), stream.take(count // 2), stream.take(count - count // 2 - 2)])
    assert torch.equal(drawn, torch.randn(count, generator=torch.Generator().manual_seed(3), dtype=dtype))

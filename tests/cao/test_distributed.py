import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from small_models import batch, flat_params, loss_of, smooth_network, ten_steps, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from two_ranks import SETTINGS, WORLD, run_rank, train_from

from cao import CAO


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What two processes under DistributedDataParallel came to."""
    directory = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(run_rank, (directory,), nprocs=WORLD)
    return [torch.load(f"{directory}/rank{rank}") for rank in range(WORLD)]


@pytest.fixture
def gloo(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["loss", "parts", "gauss-newton"])
def test_two_processes_take_the_steps_of_one_on_the_joined_batch(ranks, kind):
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    train_from(kind, model, optimizer, [batch(16, seed=seed) for seed in range(8)])
    params, sketch, counters = ranks[0][f"smooth {kind}"]
    torch.testing.assert_close(params, flat_params(model), rtol=1e-8, atol=1e-10)
    assert sketch[0] == pytest.approx(optimizer.sketch.values, rel=1e-7)
    assert counters == tuple(optimizer.counters)


def test_accumulation_without_sync_takes_the_steps_of_one_process_on_the_joined_batch(ranks):
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    for inputs, labels in (batch(16, seed=seed) for seed in range(8)):
        optimizer.zero_grad()
        # A refresh sees the first part of each process's half.
        seen = torch.cat([inputs[:4], inputs[8:12]]), torch.cat([labels[:4], labels[8:12]])
        optimizer.refresh_if_due(loss_of(model, seen))
        loss_of(model, (inputs, labels)).backward()
        optimizer.step()
    params, counters = ranks[0]["accumulated"]
    torch.testing.assert_close(params, flat_params(model), rtol=1e-8, atol=1e-10)
    assert counters == tuple(optimizer.counters)
    assert torch.equal(params, ranks[1]["accumulated"][0])


@pytest.mark.parametrize("name", ["smooth", "noisy"])
@pytest.mark.parametrize("kind", ["loss", "parts", "gauss-newton"])
def test_replicas_stay_equal_bit_for_bit(ranks, name, kind):
    (params, *rest), (other_params, *other_rest) = (ends[f"{name} {kind}"] for ends in ranks)
    assert torch.equal(params, other_params)
    assert rest == other_rest


def test_a_loss_that_is_no_number_on_one_rank_discards_the_refresh_on_all(ranks):
    assert ranks[0]["failure"] == ranks[1]["failure"]
    assert ranks[0]["failure"][4] == 1


def test_a_refresh_through_the_wrapped_model_leaves_the_statistics_of_every_rank_alone(ranks):
    assert not torch.equal(ranks[0]["buffers"][0][0], ranks[1]["buffers"][0][0])
    for ends in ranks:
        before, after = ends["buffers"]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.usefixtures("gloo")
def test_the_default_process_group_may_be_named():
    ends = []
    for group in (dist.group.WORLD, None):
        model = smooth_network()
        ends.append(ten_steps(model, CAO(model.parameters(), 0.1, **SETTINGS, process_group=group), 0))
    assert torch.equal(*ends)


@pytest.mark.usefixtures("gloo")
def test_an_optimizer_with_a_process_group_can_be_copied():
    model = smooth_network()
    pair = (model, CAO(model.parameters(), 0.1, **SETTINGS, process_group=dist.group.WORLD))
    other, other_optimizer = copy.deepcopy(pair)
    assert torch.equal(ten_steps(other, other_optimizer, 0), ten_steps(*pair, 0))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_distributed_checkpoint_brings_everything_back(dtype, tmp_path: Path):
    model = smooth_network(dtype)
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    ten_steps(model, optimizer, 0)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")

    other = smooth_network(dtype)
    other_optimizer = CAO(other.parameters(), 0.1, **SETTINGS)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, other_optimizer)}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])
    assert torch.equal(ten_steps(other, other_optimizer, 10), ten_steps(model, optimizer, 10))
    assert other_optimizer.counters == optimizer.counters


@pytest.mark.usefixtures("gloo")
def test_asking_a_fresh_optimizer_for_its_distributed_state_changes_no_later_step():
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    before = flat_params(model)
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(flat_params(model), before)
    assert optimizer.is_refresh_due
    reference = smooth_network()
    train(model, optimizer, [batch(seed=seed) for seed in range(4)])
    train(reference, CAO(reference.parameters(), 0.1, **SETTINGS), [batch(seed=seed) for seed in range(4)])
    assert torch.equal(flat_params(model), flat_params(reference))

import copy
import math
import pickle

import pytest
import torch
from small_models import Quadratic, batch, dense_hessian, descend, loss_of, smooth_network, top_sketch, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from cao import CAO
from cao.integrations.tensorboard import to_tensorboard
from cao.integrations.watching import Refreshed, scalars, watch


def test_every_refresh_is_told_with_the_sharpness_of_the_dense_matrix():
    told: list[Refreshed] = []
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.01, rank=2, refresh_every=5, damping=1.0, power_iterations=60)
    watch(optimizer, told.append)
    descend(problem, optimizer, 12)
    assert [event.step for event in told] == [0, 5, 10]
    assert [event.refreshes for event in told] == [1, 2, 3]
    assert [event.sharpness for event in told] == pytest.approx([9.0] * 3)
    assert {(event.rank, event.damping) for event in told} == {(2, 1.0)}
    assert told[-1].hessian_products == optimizer.counters.hessian_products


def test_the_sharpness_is_the_magnitude_where_the_largest_curvature_is_negative():
    told: list[Refreshed] = []
    problem = Quadratic((-9.0, 4.0, 1.0))
    optimizer = CAO(problem.params, 0.01, rank=1, damping=1.0, power_iterations=60)
    watch(optimizer, told.append)
    descend(problem, optimizer, 1)
    assert told[0].sharpness == pytest.approx(9.0)


def test_seconds_add_up():
    told: list[Refreshed] = []
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.01, refresh_every=1, damping=1.0)
    watch(optimizer, told.append)
    descend(problem, optimizer, 3)
    assert all(event.seconds > 0 for event in told)
    assert told[-1].total_seconds == pytest.approx(sum(event.seconds for event in told))


def test_a_refresh_that_failed_is_told_too():
    told: list[Refreshed] = []
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1)
    watch(optimizer, told.append)
    with pytest.warns(UserWarning, match="non-finite"):
        optimizer.refresh(loss_of(model, batch()) * torch.nan)
    assert told[0].refreshes == 0
    assert math.isnan(told[0].sharpness)


def test_watching_changes_no_step_and_ends_when_removed():
    ends, told = [], []
    for is_watched in (True, False):
        problem = Quadratic()
        optimizer = CAO(problem.params, 0.01, rank=2, refresh_every=2, damping=1.0)
        if is_watched:
            handle = watch(optimizer, told.append)
        ends.append(descend(problem, optimizer, 4))
        if is_watched:
            handle.remove()
        ends.append(descend(problem, optimizer, 4))
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
    assert len(told) == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_two_watches_end_in_any_order(order):
    told: tuple[list, list] = ([], [])
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.01, refresh_every=1, damping=1.0)
    handles = [watch(optimizer, each.append) for each in told]
    descend(problem, optimizer, 1)
    handles[order[0]].remove()
    descend(problem, optimizer, 1)
    handles[order[1]].remove()
    descend(problem, optimizer, 1)
    assert [len(told[number]) for number in order] == [1, 2]
    handles[order[0]].remove()
    descend(problem, optimizer, 1)
    assert [len(told[number]) for number in order] == [1, 2]


def test_neither_a_copy_nor_a_pickle_is_watched():
    told: list[Refreshed] = []
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1)
    watch(optimizer, told.append)
    train(model, optimizer, [batch()])
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        loss = sum(p.square().sum() for group in other.param_groups for p in group["params"])
        assert other.refresh(loss)
    assert len(told) == 1


def test_a_watch_refuses_what_has_no_curvature():
    with pytest.raises(TypeError, match="watch needs a CAO optimizer, got SGD"):
        watch(torch.optim.SGD(smooth_network().parameters(), 0.1), print)


def test_tensorboard_reads_back_what_the_dense_hessian_says(tmp_path):
    model, data = smooth_network(), batch()
    optimizer = CAO(
        model.parameters(), 0.1, rank=2, refresh_every=2, damping=0.5, power_iterations=20, eigensolver="lanczos"
    )
    with SummaryWriter(tmp_path) as writer:
        watch(optimizer, to_tensorboard(writer))
        expected = top_sketch(dense_hessian(model, data), 1)[0].abs().item()
        train(model, optimizer, [data] * 3)
    read = EventAccumulator(str(tmp_path)).Reload()
    curve = read.Scalars("cao/sharpness")
    assert [point.step for point in curve] == [0, 2]
    assert curve[0].value == pytest.approx(expected, rel=1e-5)
    assert set(read.Tags()["scalars"]) == set(scalars(Refreshed(*[0] * 8)))

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from ranks_in_trouble import CASES, SETTINGS, STEPS, WORLD, run_rank, share, warm_up
from small_models import batch, flat_params, loss_of, smooth_network, train
from torch import nn

from cao import CAO

Outcomes = list[Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where two processes have left what became of them."""
    path = tmp_path_factory.mktemp("ranks")
    try:
        mp.spawn(run_rank, (str(path),), nprocs=WORLD)
    except mp.ProcessExitedException as error:
        (path / "end").write_text(str(error))
    return path


def outcomes(directory: Path, name: str) -> Outcomes:
    """Return what each process found in a case."""
    number = list(CASES).index(name)
    files = [directory / f"{rank}-{number}" for rank in range(WORLD)]
    assert all(file.exists() for file in files), (directory / "end").read_text()
    found = [torch.load(file, weights_only=False) for file in files]
    assert [label for label, _ in found] == [name] * WORLD
    for _, outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for _, outcome in found]


def top_values(rank: int, model: nn.Module) -> list[float]:
    """Return what a process finds with its own share of the batch and nobody else."""
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    optimizer.refresh(loss_of(model, share(rank, 0)))
    return optimizer.sketch.values


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("static")])
def test_a_static_graph_goes_on_synchronising_gradients_after_a_refresh(directory, name):
    gradients, ends, refreshes = zip(*outcomes(directory, name), strict=True)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
    assert all(torch.equal(ends[0], other) for other in ends[1:])
    assert refreshes == (2 if " 0 " in name else 1,) * WORLD


@pytest.mark.parametrize(
    ("kind", "warmup"), [("loss", 0), ("loss", 2), ("wrapped", 0), ("wrapped", 2), ("unwrapped", 0), ("parts", 0)]
)
def test_a_static_graph_takes_the_steps_of_one_process_on_the_joined_batch(directory, kind, warmup):
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    for step in range(STEPS):
        warm_up(optimizer, is_over=step >= warmup)
        train(model, optimizer, [batch(16, seed=step)])
    _, end, _ = outcomes(directory, f"static {kind} {warmup} smooth_network")[0]
    torch.testing.assert_close(end, flat_params(model), rtol=1e-8, atol=1e-10)


def test_a_process_outside_the_group_is_told_so(directory):
    (error, _), (refusal, values) = outcomes(directory, "outside the group")
    assert not error
    assert "not in process_group" in refusal
    assert values == []


def test_a_copied_optimizer_keeps_its_process_group(directory):
    for rank, values in enumerate(outcomes(directory, "copied group")):
        assert values == pytest.approx(top_values(rank, smooth_network()), rel=1e-9)


@pytest.mark.parametrize("name", ["own models, shared", "other sizes"])
def test_models_that_differ_between_processes_are_refused_in_all_of_them(directory, name):
    for outcome in outcomes(directory, name):
        refusal = outcome if isinstance(outcome, str) else outcome[0]
        assert "parameters differ between" in refusal
        assert "process_group=False" in refusal


def test_each_process_may_train_a_model_of_its_own(directory):
    for rank, (refusal, values, params) in enumerate(outcomes(directory, "own models, opted out")):
        assert not refusal
        model = nn.Linear(3, 2).double()
        nn.utils.vector_to_parameters(params, model.parameters())
        assert values == pytest.approx(top_values(rank, model), rel=1e-9)


@pytest.mark.parametrize("kind", ["at once", "in a later sweep", "bad source"])
def test_an_error_in_one_process_ends_the_refresh_in_all_and_the_next_one_works(directory, kind):
    found = outcomes(directory, f"error {kind}")
    assert "failed in 1 other process" in found[0][0]
    assert ("must be a scalar" if kind == "bad source" else "the disk is gone") in found[1][0]
    assert all(is_due for _, is_due, *_ in found)
    assert all(not second for _, _, second, _ in found)
    assert found[0][3] == found[1][3] != []


@pytest.mark.parametrize("name", ["fsdp", "fsdp with original parameters"])
def test_the_older_sharded_models_are_refused_by_name(directory, name):
    for refusal in outcomes(directory, name):
        assert "FullyShardedDataParallel" in refusal
        assert "use fully_shard (FSDP2) or DistributedDataParallel" in refusal


def test_parts_of_a_model_under_zero_redundancy_are_refused(directory):
    assert all("parameters differ between" in refusal for refusal in outcomes(directory, "zero redundancy"))


def test_a_refresh_within_join_is_refused_before_anything_is_wrong(directory):
    untouched = flat_params(smooth_network())
    for refusal, params in outcomes(directory, "uneven inputs"):
        assert "join" in refusal
        assert torch.equal(params, untouched)


def test_a_copy_of_an_optimizer_without_a_group_has_none():
    model = smooth_network()
    assert copy.deepcopy(CAO(model.parameters(), 0.1)).process_group is None

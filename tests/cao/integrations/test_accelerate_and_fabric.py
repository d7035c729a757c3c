import copy
import runpy
from pathlib import Path

import accelerate
import pytest
import torch
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import dense_hessian, loss_of, smooth_network, top_sketch
from torch import nn

from cao import CAO, SketchedLBFGS
from cao.integrations.accelerate import Accelerator

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_prepared_optimizer_takes_the_steps_of_the_documented_loop():
    accelerator = Accelerator(cpu=True)
    network = smooth_network()
    model, optimizer = accelerator.prepare(network, CAO(network.parameters(), 0.1, **SETTINGS))
    for data in BATCHES:
        loss = loss_of(model, data)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        accelerator.backward(loss)
        optimizer.step()
    assert_as_in_the_plain_loop(network, optimizer)


def test_the_curvature_is_that_of_the_loss_that_accelerate_divides():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    network = smooth_network()
    expected = top_sketch(dense_hessian(network, BATCHES[0]), 2)[0]
    optimizer = CAO(network.parameters(), 0.1, rank=2, damping=0.5, power_iterations=20, eigensolver="lanczos")
    model, optimizer = accelerator.prepare(network, optimizer)
    for data in BATCHES[:4]:
        with accelerator.accumulate(model):
            loss = loss_of(model, data)
            optimizer.refresh_if_due(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.counters.steps == 1
    assert optimizer.sketch.values == pytest.approx(expected.tolist(), rel=1e-6)


def test_the_state_comes_back_through_accelerate(tmp_path):
    accelerator = Accelerator(cpu=True)
    network = smooth_network()
    model, optimizer = accelerator.prepare(network, CAO(network.parameters(), 0.1, **SETTINGS))

    def train(batches: list) -> None:
        for data in batches:
            loss = loss_of(model, data)
            optimizer.zero_grad()
            optimizer.refresh_if_due(loss)
            accelerator.backward(loss)
            optimizer.step()

    train(BATCHES[:5])
    accelerator.save_state(str(tmp_path))
    train(BATCHES[:3])
    accelerator.load_state(str(tmp_path))
    train(BATCHES[5:])
    assert_as_in_the_plain_loop(network, optimizer)


def test_a_prepared_optimizer_is_still_one_of_accelerate_and_can_be_copied():
    network = smooth_network()
    optimizer = Accelerator(cpu=True).prepare(CAO(network.parameters(), 0.1, **SETTINGS))
    assert isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer)
    assert copy.deepcopy(optimizer).is_refresh_due
    with pytest.raises(AttributeError, match="'CAO' object has no attribute 'nonsense'"):
        optimizer.nonsense  # noqa: B018


def test_the_status_of_l_bfgs_is_within_reach_and_other_optimizers_are_as_they_were():
    accelerator, network = Accelerator(cpu=True), smooth_network()
    lbfgs = accelerator.prepare(SketchedLBFGS(network.parameters()))

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(network, BATCHES[0])
        accelerator.backward(loss)
        return loss

    lbfgs.step(closure)
    assert lbfgs.status.iterations > 0
    other = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    assert type(other) is accelerate.optimizer.AcceleratedOptimizer


@pytest.mark.parametrize("name", ["accelerate_loop", "fabric_loop"])
def test_the_example_trains(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 2

"""Sweeps over rates: problems that train, logs that go on where they were."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.optim import SGD

from cao_lab.log.header import read_header, read_sweep, read_sweeps
from cao_lab.log.records import LogError
from cao_lab.sweeps import sweep
from cao_lab.sweeps.problems import PROBLEMS, Recipe, regression
from cao_lab.sweeps.sweep import METHODS, carry_out, half_decades, train

SHORT = Recipe("linear-regression", "full", None, 20, regression)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.name != "resnet"], ids=lambda problem: problem.name)
def test_each_problem_is_deterministic_and_can_be_differentiated_twice(problem):
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        task = problem.build(None)
        loss = task.loss(torch.arange(4))
        losses.append(float(loss))
        gradient = torch.autograd.grad(loss, list(task.model.parameters()), create_graph=True)
        sum(part.square().sum() for part in gradient).backward()
        assert all(p.grad.isfinite().all() for p in task.model.parameters() if p.grad is not None)
    assert losses[0] == losses[1]


def test_rates_are_half_a_decade_apart():
    rates = half_decades(-3)
    assert len(rates) == 9
    assert rates[0] == 1e-3
    assert rates[-1] == 10
    assert [math.log10(b / a) for a, b in pairwise(rates)] == pytest.approx([0.5] * 8, abs=0.01)


def test_a_run_is_that_of_a_plain_loop():
    records = train(SHORT, 3, "sgd", 0.01)
    torch.manual_seed(3)
    task = regression(None)
    optimizer = SGD(task.model.parameters(), 0.01, momentum=0.9)
    losses = [task.evaluated()]
    for step in range(1, 21):
        optimizer.zero_grad()
        task.loss(torch.arange(len(task.inputs))).backward()
        optimizer.step()
        if step % 2 == 0:
            losses.append(task.evaluated())
    assert [record.loss for record in records] == losses
    assert [record.step for record in records] == list(range(0, 21, 2))


def test_a_sweep_that_was_interrupted_goes_on_where_it_was(tmp_path, monkeypatch):
    few = {name: replace(METHODS[name], rates=METHODS[name].rates[:2]) for name in ("sgd", "cao")}
    monkeypatch.setattr(sweep, "METHODS", few)
    done = carry_out(SHORT, 1, tmp_path)
    assert [next(done), next(done)] == [f"linear-regression seed 1 sgd {rate:g}" for rate in few["sgd"].rates]
    folder = tmp_path / "linear-regression/seed1"
    assert read_header(folder)["status"] == "running"
    done.close()
    assert len(list(carry_out(SHORT, 1, tmp_path))) == 2
    assert list(carry_out(SHORT, 1, tmp_path)) == []
    (found,) = read_sweeps(tmp_path, [])
    assert len(found.records) == 4 * 11
    assert {record.method for record in found.records} == {"sgd", "cao"}


def test_a_damaged_log_is_refused_with_the_reason(tmp_path):
    (tmp_path / "sweep.json").write_text('{"problem": "mlp", "kind": "full", "steps": 3, "seed": 1}')
    (tmp_path / "losses.csv").write_text("method,lr,step,loss,seconds,products,captured\nsgd,fast,0,1,0,0,0\n")
    with pytest.raises(LogError, match="could not convert string to float: 'fast'"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 5000, '{"problem": 3, "kind": "full", "steps": 3, "seed": 1}'])
def test_a_damaged_sweep_costs_itself_and_a_sentence(tmp_path, content):
    for seed, text in ((1, '{"problem": "mlp", "kind": "full", "steps": 3, "seed": 1}'), (2, content)):
        folder = tmp_path / f"robust/mlp/seed{seed}"
        folder.mkdir(parents=True)
        (folder / "sweep.json").write_text(text)
    missing = []
    (found,) = read_sweeps(tmp_path / "robust", missing)
    assert found.seed == 1
    (sentence,) = missing
    assert sentence.startswith("robust/mlp/seed2: sweep.json cannot be read")

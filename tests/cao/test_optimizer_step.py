import pytest
import torch
from small_models import (
    Quadratic,
    batch,
    dense_hessian,
    dense_preconditioner,
    descend,
    fixed,
    flat_params,
    smooth_network,
    top_sketch,
    train,
)
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from cao import CAO, Eigenpairs

EXACT = {"eigensolver": "lanczos", "power_iterations": 30}
"""Enough iterations to exhaust the space, so that the sketch is the dense one."""
RULES = {"magnitude": torch.abs, "clip": lambda values: values.clamp_min(0), "signed": lambda values: values}


def unit_pairs(values: list[float], size: int) -> Eigenpairs:
    """Return pairs along the first coordinate axes, so that expected updates can be written down."""
    values = torch.tensor(values, dtype=torch.float64)
    return Eigenpairs(values, torch.eye(size, dtype=torch.float64)[:, : len(values)], torch.zeros_like(values))


def step_with(optimizer: CAO, param: Tensor, gradient: list[float]) -> Tensor:
    """Take one step along a given gradient and return how far it moved."""
    before = param.detach().clone()
    param.grad = torch.tensor(gradient, dtype=param.dtype)
    optimizer.step()
    return param.detach() - before


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ],
)
def test_rank_0_with_unit_scaling_is_sgd_bit_for_bit(settings):
    ours, theirs = smooth_network(), smooth_network()
    batches = [batch(seed=seed) for seed in range(20)]
    train(ours, fixed(ours.parameters(), 0.1, rank=0, scaling="unit", **settings), batches)
    train(theirs, SGD(theirs.parameters(), 0.1, **settings), batches)
    assert torch.equal(flat_params(ours), flat_params(theirs))


def test_rank_0_with_unit_scaling_is_sgd_bit_for_bit_with_groups_that_differ():
    ends = []
    for optimizer_class, settings in ((CAO, {"rank": 0, "scaling": "unit"}), (SGD, {})):
        model = smooth_network()
        groups = [
            {"params": model[0].parameters(), "lr": 0.3, "momentum": 0.9},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        train(model, optimizer_class(groups, lr=0.01, **settings), [batch(seed=seed) for seed in range(20)])
        ends.append(flat_params(model))
    assert torch.equal(*ends)


def test_rank_0_with_inverse_damping_is_sgd_at_the_rate_over_the_damping():
    ours, theirs = smooth_network(), smooth_network()
    batches = [batch(seed=seed) for seed in range(20)]
    train(ours, fixed(ours.parameters(), 0.01, rank=0, damping=0.1, momentum=0.5), batches)
    train(theirs, SGD(theirs.parameters(), 0.1, momentum=0.5), batches)
    torch.testing.assert_close(flat_params(ours), flat_params(theirs), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scaling", ["inverse-damping", "unit"])
def test_a_trajectory_is_that_of_dense_solves(rule, scaling):
    model, data, lr, damping = smooth_network(), batch(), 0.02, 0.4
    theta = flat_params(model)
    optimizer = fixed(
        model.parameters(), lr, rank=3, refresh_every=1, damping=damping, scaling=scaling, negative_curvature=rule,
        **EXACT,
    )  # fmt: skip
    for _ in range(3):
        before, matrix = flat_params(model), dense_hessian(model, data)
        train(model, optimizer, [data])
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        update = dense_preconditioner(matrix, 3, damping, RULES[rule]) @ gradient
        expected = before - lr * (damping if scaling == "unit" else 1) * update
        torch.testing.assert_close(flat_params(model), expected, rtol=1e-9, atol=1e-11)
    assert not torch.equal(flat_params(model), theta)


def test_subspace_iteration_takes_the_same_steps_as_lanczos_once_both_have_converged():
    ends = []
    for settings in (EXACT, {"eigensolver": "subspace", "power_iterations": 40}):
        problem = Quadratic()
        optimizer = fixed(problem.params, 0.05, rank=3, refresh_every=2, damping=0.5, **settings)
        ends.append(descend(problem, optimizer, 6))
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_clip_momentum_preconditioner_and_rate_come_in_the_documented_order(nesterov):
    lr, damping, decay, clip, momentum = 0.05, 0.5, 0.3, 1.5, 0.8
    problem = Quadratic()
    optimizer = fixed(
        problem.params, lr, rank=2, refresh_every=100, damping=damping, weight_decay=decay, momentum=momentum,
        max_update_norm=clip, nesterov=nesterov, **EXACT,
    )  # fmt: skip
    theta, preconditioner = problem.theta, damping * dense_preconditioner(problem.matrix, 2, damping)
    buffer, norms = torch.zeros_like(theta), []
    for _ in range(12):
        gradient = problem.gradient(theta) + decay * theta
        norms.append((preconditioner @ gradient / damping).norm())
        gradient = gradient * min(1, clip / norms[-1])
        buffer = preconditioner @ (momentum * buffer + gradient)
        update = preconditioner @ (gradient + momentum * buffer) if nesterov else buffer
        theta = theta - lr / damping * update
    torch.testing.assert_close(descend(problem, optimizer, 12), theta, rtol=1e-8, atol=1e-9)
    assert max(norms) > clip


def test_the_complement_of_the_sketch_takes_exactly_an_sgd_step_under_unit_scaling():
    ours, theirs = (torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = fixed([ours], 0.1, damping=0.3, scaling="unit")
    optimizer.refresh(unit_pairs([7.0], 3))
    ours.grad = torch.tensor([0.5, 0.3, -0.7], dtype=torch.float64)
    theirs.grad = ours.grad.clone()
    optimizer.step()
    SGD([theirs], 0.1).step()
    assert torch.equal(ours[1:], theirs[1:])
    assert ours[0].item() == pytest.approx(1.0 - 0.1 * 0.5 * 0.3 / 7.3, rel=1e-14)


def test_unit_scaling_is_inverse_damping_at_the_rate_times_the_damping():
    ends = []
    for lr, scaling in ((0.1, "inverse-damping"), (0.1 / 0.4, "unit")):
        problem = Quadratic()
        optimizer = fixed(problem.params, lr, rank=2, damping=0.4, scaling=scaling, momentum=0.5, **EXACT)
        ends.append(descend(problem, optimizer, 10))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_of_rank_0_and_unit_scaling_are_those_of_sgd_and_need_no_refresh(momentum):
    ours, theirs = smooth_network(), smooth_network()
    optimizer = fixed(ours.parameters(), 0.1, rank=0, scaling="unit", damping=0.01, momentum=momentum)
    batches = [batch(seed=seed) for seed in range(5)]
    train(ours, optimizer, batches)
    train(theirs, SGD(theirs.parameters(), 0.1, momentum=momentum), batches)
    assert torch.equal(flat_params(ours), flat_params(theirs))
    assert optimizer.sketch is None


def test_the_first_step_after_those_of_rank_0_is_preconditioned():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.01, rank=0, damping=0.5, scaling="unit")
    before = descend(problem, optimizer, 2)
    optimizer.param_groups[0].update(rank=6, scaling="inverse-damping")
    expected = before - 0.01 * dense_preconditioner(problem.matrix, 6, 0.5) @ problem.gradient(before)
    torch.testing.assert_close(descend(problem, optimizer, 1), expected, rtol=1e-10, atol=1e-12)


def test_the_signed_rule_follows_the_papers_formula_uphill():
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = fixed([param], 1.0, rank=2, damping=0.5, negative_curvature="signed")
    optimizer.refresh(unit_pairs([-1.5, 3.5], 3))
    assert step_with(optimizer, param, [1.0, 1.0, 1.0]).tolist() == pytest.approx([1.0, -0.25, -2.0])
    assert optimizer.counters.indefinite_refreshes == 1


@pytest.mark.parametrize(("offset", "count"), [(0.0, 1), (4e-7, 1), (-4e-7, 1), (2e-6, 0)])
def test_a_direction_whose_damped_curvature_vanishes_is_left_to_the_complement_and_counted(offset, count):
    param = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = fixed([param], 1.0, damping=0.5, negative_curvature="signed")
    optimizer.refresh(unit_pairs([-0.5 * (1 + offset)], 2))
    moved = step_with(optimizer, param, [1.0, 1.0])
    assert optimizer.counters.singular_directions == count
    assert float(moved[0]) == pytest.approx(-2.0 if count else 1e6, rel=1e-6)


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.2, 0.001), (1.0, 0.0), (0.0, 0.03)])
def test_groups_of_different_rates_take_the_symmetric_step(rates):
    problem = Quadratic(sizes=(2, 4))
    groups = [{"params": [p], "lr": rate} for p, rate in zip(problem.params, rates, strict=True)]
    optimizer = fixed(groups, 1.0, rank=3, refresh_every=1, damping=0.5, **EXACT)
    root = torch.tensor([rates[0]] * 2 + [rates[1]] * 4, dtype=torch.float64).sqrt()
    preconditioner = dense_preconditioner(problem.matrix, 3, 0.5)
    for _ in range(4):
        expected = problem.theta - root * (preconditioner @ (root * problem.gradient(problem.theta)))
        torch.testing.assert_close(descend(problem, optimizer, 1), expected, rtol=1e-9, atol=1e-11)


def test_groups_of_different_rates_descend_where_a_diagonal_rate_would_climb():
    values, rates = torch.tensor([0.0, 1e4], dtype=torch.float64), torch.tensor([1e-4, 1e-8], dtype=torch.float64)
    vectors = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64) / 2**0.5
    gradient = torch.tensor([0.1, 1.0], dtype=torch.float64)
    naive = rates * (vectors @ ((vectors.T @ gradient) / (values + 0.1)))
    assert gradient @ naive < 0
    params = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = fixed([{"params": [p], "lr": float(r)} for p, r in zip(params, rates, strict=True)], 1.0, rank=2)
    optimizer.refresh(Eigenpairs(values, vectors, torch.zeros_like(values)))
    for param, slope in zip(params, gradient, strict=True):
        param.grad = slope.reshape(1)
    optimizer.step()
    assert gradient @ torch.cat(params).detach() < 0


def test_clipping_with_different_rates_measures_the_move_over_the_largest_rate():
    problem, rates, clip = Quadratic(sizes=(2, 4)), (0.2, 0.05), 0.7
    groups = [{"params": [p], "lr": rate} for p, rate in zip(problem.params, rates, strict=True)]
    optimizer = fixed(groups, 1.0, rank=3, damping=0.5, max_update_norm=clip, **EXACT)
    scale = torch.tensor([rates[0]] * 2 + [rates[1]] * 4, dtype=torch.float64)
    root, before = scale.sqrt(), problem.theta
    update = (dense_preconditioner(problem.matrix, 3, 0.5) @ (root * problem.gradient(before))) / root
    move = scale * update
    length = move.norm() / max(rates)
    assert length > clip
    expected = before - move * clip / length
    torch.testing.assert_close(descend(problem, optimizer, 1), expected, rtol=1e-9, atol=1e-11)


def test_a_frozen_group_is_left_out_of_the_clipped_norm():
    still, moving = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    groups = [{"params": [still], "lr": 0.0}, {"params": [moving]}]
    optimizer = fixed(groups, 1.0, rank=0, scaling="unit", max_update_norm=2.0)
    still.grad, moving.grad = torch.full_like(still, 1e9), torch.ones_like(moving)
    optimizer.step()
    assert (still.item(), moving.item()) == (0.0, -1.0)


def test_a_group_that_hardly_moves_does_not_hold_the_others_back():
    moves = []
    for slow in (1e-12, 1e-6, 0.0):
        problem = Quadratic(sizes=(2, 4))
        groups = [{"params": [problem.params[0]]}, {"params": [problem.params[1]], "lr": slow}]
        optimizer = fixed(groups, 0.1, rank=3, damping=0.5, max_update_norm=0.2, **EXACT)
        before = problem.theta
        moves.append((descend(problem, optimizer, 1) - before)[:2].norm().item())
    assert moves == pytest.approx([0.02] * 3, rel=1e-3)


def test_an_update_within_the_limit_is_not_clipped_and_zero_stays_zero():
    param = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = fixed([param], 1.0, rank=0, scaling="unit", max_update_norm=5.0)
    assert step_with(optimizer, param, [3.0, -4.0]).tolist() == [-3.0, 4.0]
    assert step_with(optimizer, param, [6.0, -8.0]).tolist() == pytest.approx([-3.0, 4.0])
    assert step_with(optimizer, param, [0.0, 0.0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("stretch", "small"), [(1, 100), (2, 100), (5, 100), (5, 2), (2, 1), (5, 0)])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_steps_do_not_depend_on_how_parameters_are_ordered_cut_or_joined(monkeypatch, stretch, small, missing):
    ends = []
    for longest, largest_small in ((stretch, small), (100, 100)):
        monkeypatch.setattr("cao.sketch.damped.STRETCH", longest)
        monkeypatch.setattr("cao.linalg.flat.SMALL", largest_small)
        problem = Quadratic(sizes=(1, 3, 2))
        groups = [{"params": problem.params[:2], "lr": 0.02}, {"params": problem.params[2:], "momentum": 0.5}]
        optimizer = fixed(groups, 0.01, rank=3, damping=0.5, weight_decay=0.1, max_update_norm=1.0, **EXACT)
        for step in range(6):
            loss = problem.loss()
            optimizer.zero_grad()
            optimizer.refresh_if_due(loss)
            loss.backward()
            if missing is not None and step % 2:
                problem.params[missing].grad = None
            optimizer.step()
        ends.append(problem.theta)
    torch.testing.assert_close(*ends, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: StepLR(optimizer, 3, 0.5),
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
        lambda optimizer: LambdaLR(optimizer, [lambda step: step / 5, lambda step: 1 / (1 + step)]),
        lambda optimizer: OneCycleLR(optimizer, [0.2, 0.1], total_steps=15),
    ],
    ids=["step", "cosine", "warm-up from zero of one group", "one cycle"],
)
def test_schedulers_act_as_on_sgd(schedule):
    ends = []
    for optimizer_class, settings in ((CAO, {"rank": 0, "scaling": "unit"}), (SGD, {})):
        model = smooth_network()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
        optimizer = optimizer_class(groups, lr=0.1, momentum=0.9, **settings)
        scheduler = schedule(optimizer)
        for seed in range(12):
            train(model, optimizer, [batch(seed=seed)])
            scheduler.step()
        ends.append(flat_params(model))
    assert torch.equal(*ends)


def test_a_plateau_scheduler_lowers_the_rate():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1, damping=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_the_rate_may_be_a_tensor():
    problem, reference = Quadratic(), Quadratic()
    ours = descend(problem, fixed(problem.params, torch.tensor(0.05, dtype=torch.float64), rank=2), 5)
    assert torch.equal(ours, descend(reference, fixed(reference.params, 0.05, rank=2), 5))


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned():
    problem, calls = Quadratic(), []
    optimizer = fixed(problem.params, 0.1, rank=2)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = problem.loss()
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        return loss

    expected = problem.loss().item()
    with torch.no_grad():
        assert optimizer.step(closure).item() == expected
    assert calls == [True]
    assert problem.loss().item() != expected


def test_a_ready_sketch_serves_as_a_random_subspace_control():
    problem = Quadratic()
    values, _ = top_sketch(problem.matrix, 2)
    vectors = torch.linalg.qr(torch.randn(6, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).Q
    optimizer = fixed(problem.params, 0.1, rank=2, damping=0.5)
    optimizer.refresh(Eigenpairs(values, vectors, torch.zeros(2, dtype=torch.float64)))
    sketch = vectors @ torch.diag(values.abs()) @ vectors.T + 0.5 * torch.eye(6, dtype=torch.float64)
    expected = problem.theta - 0.1 * torch.linalg.solve(sketch, problem.gradient(problem.theta))
    torch.testing.assert_close(descend(problem, optimizer, 1), expected, rtol=1e-10, atol=1e-12)


def test_a_huge_ready_value_projects_its_direction_out():
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = fixed([param], 1.0, rank=2, damping=0.5, scaling="unit")
    optimizer.refresh(unit_pairs([1e30, 1e30], 3))
    assert step_with(optimizer, param, [1.0, 2.0, 3.0]).tolist() == [0.0, 0.0, -3.0]


def test_a_rank_set_to_0_in_training_takes_plain_steps_from_then_on():
    problem, reference = Quadratic(), Quadratic()
    optimizer, plain = CAO(problem.params, 0.3), SGD(reference.params, 0.3)
    optimizer.refresh(problem.loss())
    assert optimizer.captured > 0
    optimizer.param_groups[0]["rank"] = 0
    for each, own in ((problem, optimizer), (reference, plain)):
        each.loss().backward()
        own.step()
    assert torch.equal(problem.theta, reference.theta)

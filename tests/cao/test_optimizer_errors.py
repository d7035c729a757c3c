import pytest
import torch
from small_models import Quadratic
from torch import Tensor, nn

from cao import CAO


def params(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, requires_grad=True) for size in sizes or (3,)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, r"lr must be a finite nonnegative number, got -0.1"),
        ({"lr": float("nan")}, r"lr must be a finite nonnegative number, got nan"),
        ({"damping": 0.0}, r'damping must be positive or "auto", got 0.0'),
        ({"damping": -1.0}, r'damping must be positive or "auto", got -1.0'),
        ({"damping": "automatic"}, r"damping must be positive or \"auto\", got 'automatic'"),
        ({"rank": -1}, r'rank must be a nonnegative whole number or "auto", got -1'),
        ({"rank": 1.5}, r'rank must be a nonnegative whole number or "auto", got 1.5'),
        ({"rank": 4}, r"rank must not exceed the number of parameters, got rank 4 for 3 parameters"),
        ({"refresh_every": 0}, r'refresh_every must be at least 1, or "auto", got 0'),
        ({"power_iterations": -1}, r"power_iterations must be a nonnegative whole number, got -1"),
        ({"max_update_norm": 0.0}, r"max_update_norm must be positive or None, got 0.0"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1}, r"momentum must be at least 0 and below 1, got -0.1"),
        ({"lr": "0.1"}, r"lr must be a finite nonnegative number, got '0.1'"),
        ({"weight_decay": -0.1}, r"weight_decay must be a nonnegative number, got -0.1"),
        ({"weight_decay": None}, r"weight_decay must be a nonnegative number, got None"),
        ({"warmup_steps": 5}, r"warmup_steps=5 is not supported: group\[\"rank\"\].*leave it out"),
        ({"tolerance": 0.1}, r"tolerance=0.1 is not supported: give it to the eigensolver"),
        ({"seed": None}, r"seed must be a whole number, got None"),
        ({"eigensolver": "power"}, r"eigensolver must be \"subspace\" or \"lanczos\", got 'power'"),
        ({"negative_curvature": "abs"}, r"negative_curvature must be one of magnitude, clip, signed, got 'abs'"),
        ({"scaling": "none"}, r"scaling must be one of inverse-damping, unit, got 'none'"),
    ],
)
def test_bad_settings_are_refused_with_what_was_wanted_and_what_was_got(settings, message):
    with pytest.raises(ValueError, match=message):
        CAO(params(), **{"lr": 0.1, **settings})


@pytest.mark.parametrize("setting", [{"rank": 2}, {"damping": 0.3}, {"refresh_every": 7}, {"warm_start": False}])
def test_settings_of_the_sketch_may_not_differ_between_groups(setting):
    first, second = params(3, 3)
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must be the same in all parameter groups"):
        CAO([{"params": [first]}, {"params": [second], **setting}], 0.1)


def test_a_refused_group_is_not_kept():
    first, second = params(3, 3)
    optimizer = CAO([first], 0.1)
    with pytest.raises(ValueError, match="lr must be a finite nonnegative number, got -1"):
        optimizer.add_param_group({"params": [second], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second]})


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match=r"must be real, got one of torch.complex64; use torch.view_as_real"):
        CAO([torch.zeros(3, dtype=torch.complex64, requires_grad=True)], 0.1)


def test_parameters_on_several_devices_are_refused():
    elsewhere = torch.zeros(3, device="meta", requires_grad=True)
    with pytest.raises(ValueError, match=r"must be on one device, got cpu, meta"):
        CAO([*params(), elsewhere], 0.1)


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        CAO([], 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: loss.detach(), "the loss has no graph; compute it from the parameters with gradients enabled"),
        (lambda loss: loss.expand(2), r"the loss must be a scalar tensor, got shape \(2,\); reduce it"),
        (lambda loss: loss.item(), "needs a loss tensor or a function .* got float"),
        (lambda loss: None, "needs a loss tensor or a function .* got NoneType"),
        (lambda loss: [loss], "needs a loss tensor or a function .* got list"),
        (lambda loss: loss.item, "the loss must be a scalar tensor, got float"),
        (lambda loss: lambda: None, "the loss must be a scalar tensor, got NoneType"),
        (lambda loss: lambda: [], "yield the same losses at every call, got 0"),
        (lambda loss: lambda: [None], "the loss must be a scalar tensor, got NoneType"),
    ],
)
def test_bad_sources_are_refused(change, message):
    problem = Quadratic()
    with pytest.raises(ValueError, match=message):
        CAO(problem.params, 0.1).refresh_if_due(change(problem.loss()))


def test_a_rank_above_the_number_of_trainable_parameters_is_refused():
    problem = Quadratic(sizes=(2, 4))
    problem.params[1].requires_grad_(False)
    with pytest.raises(ValueError, match="number of trainable parameters, got rank 3 for 2"):
        CAO(problem.params, 0.1, rank=3).refresh(problem.loss())


def test_a_model_without_trainable_parameters_is_refused():
    problem = Quadratic()
    loss = problem.loss()
    problem.params[0].requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        CAO(problem.params, 0.1).refresh(loss)


@pytest.mark.parametrize("rank", [0, 1])
def test_sparse_gradients_are_refused_and_nothing_moves(rank):
    table, dense = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
    optimizer = CAO([*dense.parameters(), table.weight], 0.1, rank=rank)
    before = dense.weight.detach().clone()
    loss = dense(table(torch.tensor([0, 2]))).square().sum()

    def iterate() -> None:
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    with pytest.raises(ValueError, match="dense gradients, got a sparse one; build the embedding with sparse=False"):
        iterate()
    assert torch.equal(dense.weight, before)


def test_an_error_in_a_closure_comes_through_and_costs_no_step():
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1)

    def broken() -> float:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        optimizer.step(broken)
    assert optimizer.counters.steps == 0


def test_a_refresh_after_the_backward_pass_is_explained():
    problem = Quadratic()
    optimizer, loss = CAO(problem.params, 0.1), problem.loss()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"graph of this loss is gone; refresh before loss.backward\(\)"):
        optimizer.refresh_if_due(loss)


def test_a_function_that_hands_out_an_old_graph_is_explained():
    problem = Quadratic()
    optimizer, loss = CAO(problem.params, 0.1), problem.loss()
    with pytest.raises(RuntimeError, match=r"let a function run its forward pass anew at every call"):
        optimizer.refresh_if_due(lambda: loss)


@pytest.mark.parametrize("as_source", [lambda loss: loss(), lambda loss: loss], ids=["loss", "function"])
def test_a_loss_of_another_model_is_refused(as_source):
    problem, other = Quadratic(), Quadratic()
    with pytest.raises(ValueError, match="depends on none of the parameters; build the optimizer from the very model"):
        CAO(problem.params, 0.1).refresh_if_due(as_source(other.loss))


def test_a_sketch_without_its_vectors_is_refused():
    problem = Quadratic()
    optimizer = CAO(problem.params, 0.1)
    optimizer.refresh(problem.loss())
    saved = optimizer.state_dict() | {"state": {}}
    with pytest.raises(
        ValueError, match=r"eigenvalues of a sketch but not all of its vectors; save optimizer.state_dict\(\) whole"
    ):
        CAO(problem.params, 0.1).load_state_dict(saved)


def test_the_state_of_another_optimizer_is_refused():
    problem = Quadratic()
    with pytest.raises(ValueError, match="must be one of CAO, got one of another optimizer"):
        CAO(problem.params, 0.1).load_state_dict(torch.optim.SGD(problem.params, 0.1).state_dict())


@pytest.mark.parametrize("settings", [{"rank": 2}, {"rank": 0, "momentum": 0.9}], ids=["sketch", "momentum"])
def test_the_state_of_a_model_of_other_shapes_is_refused_and_none_of_it_is_kept(settings):
    saved = trained(nn.Linear(3, 4), **settings).state_dict()
    optimizer = trained(nn.Linear(3, 2), **settings)
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"another model: .* of parameter 0 has the shape \(4, 3\), .* \(2, 3\)"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


def trained(model: nn.Module, **settings) -> CAO:
    optimizer = CAO(model.parameters(), lr=0.1, **settings)
    loss = model(torch.ones(5, 3)).square().sum()
    optimizer.refresh_if_due(loss)
    loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("state", [{}, nn.Linear(2, 2).state_dict()], ids=["empty", "of a model"])
def test_what_is_no_state_of_an_optimizer_is_refused(state):
    with pytest.raises(ValueError, match="must be one of CAO"):
        CAO(nn.Linear(2, 2).parameters(), lr=0.1).load_state_dict(state)


def test_an_empty_group_may_come_first():
    model = nn.Linear(3, 2)
    optimizer = CAO([{"params": []}, {"params": model.parameters()}], lr=0.1)
    loss = model(torch.ones(5, 3)).square().sum()
    optimizer.refresh_if_due(loss)
    loss.backward()
    optimizer.step()
    assert model(torch.ones(5, 3)).square().sum().item() < loss.item()

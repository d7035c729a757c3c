import gc
import random
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
from small_models import (
    Attention,
    Quadratic,
    batch,
    dense_hessian,
    dense_preconditioner,
    descend,
    fixed,
    flat,
    loss_of,
    losses_of_parts,
    noisy_network,
    seeded,
    smooth_network,
    top_sketch,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch_versions import runs_compiled_models_eagerly

from cao import CAO, Eigenpairs, GaussNewton, Hessian, Mean, SubspaceIteration


class DenseOperator:
    """A matrix that counts its products and knows which parameters it acts on."""

    def __init__(self, matrix: Tensor, params: list[Tensor]) -> None:
        self.matrix, self.params, self.products = matrix, params, 0

    def __matmul__(self, columns: Tensor) -> Tensor:
        self.products += columns.shape[1]
        return self.matrix @ columns


def refresh_steps(optimizer: CAO, problem: Quadratic, steps: int) -> list[int]:
    """Run the documented loop and return the steps at which it refreshed."""
    refreshed = []
    for step in range(steps):
        loss = problem.loss()
        optimizer.zero_grad()
        if optimizer.refresh_if_due(loss):
            refreshed.append(step)
        loss.backward()
        optimizer.step()
    return refreshed


def source_of(kind: str, model: nn.Module, data: tuple[Tensor, Tensor], loss: Tensor):
    """Return one of the ways to tell the optimizer about the curvature."""
    if kind == "loss":
        return loss
    if kind == "function":
        return lambda: loss_of(model, data)
    if kind == "parts":
        return lambda: losses_of_parts(model, data, 4)
    return GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))


def streams() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


def everything_in(model: nn.Module) -> list[object]:
    """Return the identity, version and value of all that a refresh must not touch."""
    tensors = [*model.parameters(), *model.buffers()]
    grads = [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    return [[(id(t), t._version, t.tolist()) for t in tensors], grads, modes]


SOURCES = ["loss", "function", "parts", "gauss-newton"]
sources = pytest.mark.parametrize("kind", SOURCES)


@pytest.mark.parametrize(("warmup", "expected"), [(0, [0, 4, 8]), (3, [0, 4, 8])])
def test_refreshes_come_first_after_steps_of_rank_0_and_then_at_their_interval(warmup, expected):
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=4)
    optimizer.param_groups[0]["rank"] = 0
    assert refresh_steps(optimizer, problem, warmup) == []
    optimizer.param_groups[0]["rank"] = 1
    assert refresh_steps(optimizer, problem, 12) == expected
    assert optimizer.counters.refreshes == 3


def test_rank_0_never_refreshes():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, rank=0, refresh_every=1)
    assert refresh_steps(optimizer, problem, 3) == []
    optimizer.refresh(problem.loss())
    assert optimizer.sketch is None


def test_a_refresh_happens_once_a_step_under_gradient_accumulation():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=1)
    for _ in range(3):
        assert optimizer.is_refresh_due
        answers = [optimizer.refresh_if_due(problem.loss()) for _ in range(4)]
        assert answers == [True, False, False, False]
        problem.loss().backward()
        optimizer.step()


def test_a_skipped_step_does_not_bring_another_refresh():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    answers = []
    for factor in (1.0, torch.inf, 1.0):
        loss = problem.loss()
        answers.append(optimizer.refresh_if_due(loss))
        optimizer.zero_grad()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert answers == [True, True, False]
    assert optimizer.counters.steps == 2


@sources
def test_a_refresh_touches_no_gradient_parameter_buffer_mode_or_random_stream(kind):
    model, data = noisy_network(), batch()
    optimizer = fixed(model.parameters(), 0.1, rank=2)
    loss = loss_of(model, data)
    loss.backward(retain_graph=True)
    before = (everything_in(model), streams())
    optimizer.refresh(source_of(kind, model, data, loss))
    assert (everything_in(model), streams()) == before


@sources
def test_a_refresh_may_stand_between_a_forward_and_its_backward(kind):
    gradients = []
    for is_refreshed in (True, False):
        model, data = noisy_network(), batch()
        torch.manual_seed(5)
        loss = loss_of(model, data)
        if is_refreshed:
            fixed(model.parameters(), 0.1, rank=2).refresh(source_of(kind, model, data, loss))
        loss.backward()
        gradients.append(flat([p.grad for p in model.parameters()]))
    assert torch.equal(*gradients)


def test_a_refresh_may_stand_between_a_forward_in_evaluation_mode_and_its_backward():
    model, data = noisy_network().eval(), batch()
    loss = loss_of(model, data)
    fixed(model.parameters(), 0.1, rank=2).refresh(lambda: loss_of(model.train(), data))
    loss.backward()


@sources
def test_a_refresh_works_where_gradients_are_disabled(kind):
    model, data = smooth_network(), batch()
    loss = loss_of(model, data)
    optimizers = [fixed(model.parameters(), 0.1, rank=2) for _ in range(2)]
    optimizers[0].refresh(source_of(kind, model, data, loss))
    with torch.no_grad():
        optimizers[1].refresh(source_of(kind, model, data, loss))
    assert optimizers[0].sketch == optimizers[1].sketch


def test_random_numbers_drawn_by_a_source_leave_all_streams_alone():
    problem = Quadratic()

    def noisy_loss() -> Tensor:
        return problem.loss() * (1 + torch.rand(()) + random.random() + numpy.random.rand())

    before = streams()
    fixed(problem.params, 0.1, rank=2).refresh(noisy_loss)
    assert streams() == before


def test_each_part_sees_its_own_dropout_mask_and_the_same_one_in_every_sweep():
    masks: list[tuple[float, ...]] = []
    dropout, problem = nn.Dropout(0.5), Quadratic()

    def parts():
        for _ in range(2):
            mask = dropout(torch.ones(6, dtype=torch.float64))
            masks.append(tuple(mask.tolist()))
            yield (mask * torch.cat(problem.params)).square().sum()

    fixed(problem.params, 0.1, rank=2, power_iterations=3).refresh(parts)
    assert len(masks) == 8
    assert masks[0] != masks[1]
    assert masks == masks[:2] * 4


@pytest.mark.parametrize("kind", ["loss", "function", "parts"])
def test_the_sketch_is_that_of_the_dense_hessian(kind):
    model, data = smooth_network(), batch()
    optimizer = fixed(model.parameters(), 0.1, rank=3, eigensolver="lanczos", power_iterations=30)
    optimizer.refresh(source_of(kind, model, data, loss_of(model, data)))
    values, vectors = top_sketch(dense_hessian(model, data), 3)
    ours = optimizer.sketch.vectors
    assert optimizer.sketch.values == pytest.approx(values.tolist(), rel=1e-9)
    torch.testing.assert_close((ours * vectors).sum(dim=0).abs(), torch.ones(3, dtype=torch.float64))


def test_residuals_are_stored_beside_the_values():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1, rank=2, power_iterations=2)
    optimizer.refresh(problem.loss())
    vectors = optimizer.sketch.vectors
    values = torch.tensor(optimizer.sketch.values, dtype=torch.float64)
    expected = (problem.matrix @ vectors - vectors * values).norm(dim=0)
    assert optimizer.sketch.residuals == pytest.approx(expected.tolist(), rel=1e-8)
    assert min(optimizer.sketch.residuals) > 1e-6


def test_a_warm_start_refines_the_last_subspace_and_a_cold_one_draws_anew():
    residuals = {}
    for warm_start in (True, False):
        problem = Quadratic()
        optimizer = fixed(problem.params, 0.1, rank=2, power_iterations=2, warm_start=warm_start)
        for _ in range(6):
            optimizer.refresh(problem.loss())
        residuals[warm_start] = max(optimizer.sketch.residuals)
    assert residuals[True] < 1e-2 * residuals[False]


def test_a_warm_start_leaves_a_direction_without_curvature():
    param = torch.ones(3, requires_grad=True)
    optimizer = fixed([param], 0.1)
    optimizer.refresh(param.sum())
    assert optimizer.sketch.values == [0.0]
    optimizer.refresh((param * torch.tensor([0.0, 1.0, 3.0])).square().sum() / 2)
    assert optimizer.sketch.values == pytest.approx([9.0], rel=1e-2)


def test_a_warm_start_leaves_directions_of_parameters_that_are_frozen_now():
    head, body = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = fixed([head, body], 0.1)
    body.requires_grad_(False)
    optimizer.refresh(head.square().sum())
    head.requires_grad_(False)
    body.requires_grad_(True)
    optimizer.refresh((body * torch.tensor([0.0, 1.0, 3.0])).square().sum() / 2)
    assert optimizer.sketch.values == pytest.approx([9.0], rel=1e-2)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_rank_may_be_set_anew_in_the_middle(rank):
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, rank=2, power_iterations=60)
    descend(problem, optimizer, 1)
    resumed = fixed(problem.params, 1e-3, rank=2)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.param_groups[0]["rank"] = rank
    descend(problem, resumed, 1)
    resumed.refresh(problem.loss())
    assert resumed.sketch.values == pytest.approx([9.0, -4.0, 2.0][:rank], rel=1e-6)


def test_cold_starts_differ_from_refresh_to_refresh_and_by_seed():
    sketches = []
    for seed in (0, 1):
        problem = Quadratic()
        optimizer = fixed(problem.params, 0.1, power_iterations=1, warm_start=False, seed=seed)
        for _ in range(2):
            optimizer.refresh(problem.loss())
            sketches.append(optimizer.sketch.values[0])
    assert len(set(sketches)) == 4


def test_a_tolerance_stops_the_sweeps_and_is_kept():
    problem, counts = Quadratic(), []
    for tolerance in (None, 1e-3):
        optimizer = fixed(problem.params, 0.1, rank=2, eigensolver=SubspaceIteration(50, tolerance))
        optimizer.refresh(problem.loss())
        counts.append(optimizer.counters.hessian_products)
    assert counts[1] < counts[0] == 2 * 51
    assert all(r <= 1e-3 * abs(v) for r, v in zip(optimizer.sketch.residuals, optimizer.sketch.values, strict=True))


def test_products_and_indefinite_refreshes_are_counted():
    problem = Quadratic()
    operator = DenseOperator(problem.matrix, problem.params)
    optimizer = fixed(problem.params, 1e-4, rank=2, refresh_every=2, power_iterations=4, damping=0.1)
    for _ in range(4):
        optimizer.refresh_if_due(operator)
        problem.loss().backward()
        optimizer.step()
    assert optimizer.counters.hessian_products == operator.products == 2 * 2 * 5
    assert optimizer.counters.indefinite_refreshes == optimizer.counters.refreshes == 2


def test_the_sketch_tells_the_step_and_the_damping_it_was_taken_with():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, rank=6, refresh_every=2, damping=0.3)
    descend(problem, optimizer, 4)
    assert (optimizer.sketch.step, optimizer.sketch.damping) == (2, 0.3)
    assert sorted(optimizer.sketch.values) == pytest.approx(torch.linalg.eigvalsh(problem.matrix).tolist())


def test_an_operator_over_the_same_parameters_in_another_order_is_reordered():
    problem = Quadratic(sizes=(1, 2, 3))
    order = torch.tensor([3, 4, 5, 0, 1, 2])
    operator = DenseOperator(problem.matrix[order][:, order], [problem.params[i] for i in (2, 0, 1)])
    optimizer = fixed(problem.params, 0.1, rank=6, damping=0.5)
    optimizer.refresh(operator)
    expected = problem.theta - 0.1 * dense_preconditioner(problem.matrix, 6, 0.5) @ problem.gradient(problem.theta)
    torch.testing.assert_close(descend(problem, optimizer, 1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", [lambda params: params[:-1], lambda params: [*params, torch.ones(1)]])
def test_an_operator_over_another_set_of_parameters_is_refused(change):
    problem = Quadratic(sizes=(1, 2, 3))
    operator = DenseOperator(problem.matrix, change(problem.params))
    with pytest.raises(ValueError, match="exactly the optimizer's trainable parameters"):
        fixed(problem.params, 0.1).refresh(operator)


def test_an_operator_is_evaluated_only_when_a_refresh_is_due():
    problem = Quadratic()
    operator = DenseOperator(problem.matrix, problem.params)
    optimizer = fixed(problem.params, 1e-3, refresh_every=3, power_iterations=0)
    products = []
    for _ in range(4):
        optimizer.refresh_if_due(operator)
        problem.loss().backward()
        optimizer.step()
        products.append(operator.products)
    assert products == [1, 1, 1, 2]


@pytest.mark.parametrize("build", [Mean, lambda operators: operators[0]], ids=["mean", "hessian"])
def test_operators_of_the_library_are_sources(build):
    model, data = smooth_network(), batch()
    params = list(model.parameters())
    operators = [Hessian(partial(loss_of, model, (x, y)), params) for x, y in ((data[0], data[1]),) * 2]
    optimizer = fixed(params, 0.1, rank=26)
    optimizer.refresh(build(operators))
    assert sorted(optimizer.sketch.values) == pytest.approx(
        torch.linalg.eigvalsh(dense_hessian(model, data)).tolist(), abs=1e-10
    )


def test_gauss_newton_curvature_is_positive_semidefinite_and_its_refreshes_never_indefinite():
    model, data = noisy_network(), batch()
    optimizer = fixed(model.parameters(), 0.1, rank=5, damping=1e-6)
    optimizer.refresh(source_of("gauss-newton", model, data, torch.ones(())))
    assert min(optimizer.sketch.values) > -1e-12
    assert optimizer.counters.indefinite_refreshes == 0


def test_ready_pairs_are_copied():
    problem = Quadratic()
    vectors = torch.eye(6, dtype=torch.float64)[:, :1].clone()
    optimizer = fixed(problem.params, 0.1)
    optimizer.refresh(Eigenpairs(torch.tensor([3.0]), vectors, torch.tensor([0.5])))
    vectors.zero_()
    assert optimizer.sketch.vectors[:, 0].tolist() == [1.0, 0, 0, 0, 0, 0]
    assert optimizer.sketch.residuals == [0.5]


def test_ready_pairs_of_another_size_are_refused():
    problem = Quadratic()
    pairs = Eigenpairs(torch.ones(2), torch.eye(6)[:, :2], torch.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(6, 1\), got \(6, 2\)"):
        fixed(problem.params, 0.1).refresh(pairs)


def test_ready_pairs_with_more_values_than_vectors_are_refused():
    pairs = Eigenpairs(torch.ones(1), torch.eye(6)[:, :1], torch.zeros(1))
    object.__setattr__(pairs, "values", torch.ones(2))  # Only here are shapes checked when pairs are made.
    with pytest.raises(ValueError, match=r"values of shape \(1,\), got \(2,\)"):
        fixed(Quadratic().params, 0.1).refresh(pairs)


def test_ready_pairs_must_be_orthonormal():
    pairs = Eigenpairs(torch.ones(1), 10 * torch.eye(6)[:, :1], torch.zeros(1))
    with pytest.raises(ValueError, match=r"orthonormal vectors, got VᵀV off by 99; torch.linalg.qr"):
        fixed(Quadratic().params, 0.1).refresh(pairs)


def test_a_generator_object_is_refused_because_it_can_be_read_only_once():
    problem = Quadratic()
    with pytest.raises(ValueError, match="got generator; pass a generator function itself"):
        fixed(problem.params, 0.1).refresh(problem.loss() for _ in range(3))


def test_a_function_that_returns_a_used_up_generator_is_refused():
    problem = Quadratic()
    losses = (problem.loss() for _ in range(3))
    with pytest.raises(ValueError, match="let each call return a new generator"):
        fixed(problem.params, 0.1).refresh(lambda: losses)


def test_a_refused_source_leaves_the_refresh_due():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1)
    with pytest.raises(ValueError, match="no graph"):
        optimizer.refresh_if_due(problem.loss().detach())
    assert optimizer.refresh_if_due(problem.loss())


def test_step_without_a_refresh_names_the_missing_call():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1)
    before = problem.theta
    problem.loss().backward()
    with pytest.raises(RuntimeError, match=r"refresh_if_due\(loss\) before loss.backward\(\)"):
        optimizer.step()
    assert torch.equal(problem.theta, before)


def test_step_without_a_refresh_is_refused_as_soon_as_the_rank_is_not_0_any_more():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1, rank=0)
    problem.loss().backward()
    optimizer.step()
    optimizer.step()
    optimizer.param_groups[0]["rank"] = 1
    with pytest.raises(RuntimeError, match="refresh_if_due"):
        optimizer.step()


def test_a_failed_first_refresh_takes_first_order_steps_and_is_due_again():
    problem = Quadratic()
    optimizer = fixed(problem.params, 0.1, rank=2, damping=0.5, refresh_every=100)
    with pytest.warns(UserWarning, match="non-finite and was discarded.*first-order steps"):
        optimizer.refresh_if_due(problem.loss() * torch.nan)
    expected = problem.theta - 0.1 * problem.gradient(problem.theta) / 0.5
    problem.loss().backward()
    optimizer.step()
    torch.testing.assert_close(problem.theta, expected, rtol=1e-12, atol=1e-14)
    assert optimizer.sketch is None
    assert optimizer.refresh_if_due(problem.loss())
    assert (optimizer.counters.failed_refreshes, optimizer.counters.refreshes) == (1, 1)


def test_a_failed_later_refresh_keeps_the_last_good_sketch_until_the_next_interval():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, rank=2, refresh_every=2)
    descend(problem, optimizer, 2)
    sketch, vectors = optimizer.sketch, optimizer.sketch.vectors
    with pytest.warns(UserWarning, match="the last good sketch"):
        assert not optimizer.refresh_if_due(problem.loss() * torch.inf)
    assert optimizer.sketch == sketch
    assert torch.equal(optimizer.sketch.vectors, vectors)
    assert refresh_steps(optimizer, problem, 3) == [2]


@pytest.mark.parametrize("eigensolver", ["subspace", "lanczos"])
def test_failures_warn_once_and_are_all_counted(eigensolver):
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, rank=2, eigensolver=eigensolver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.refresh(problem.loss() * torch.nan)
    assert len(caught) == 1
    assert optimizer.counters.failed_refreshes == 3


def test_an_overdue_sketch_warns_once_at_twice_the_interval():
    problem = Quadratic()
    optimizer = fixed(problem.params, 1e-3, refresh_every=3)
    descend(problem, optimizer, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ages = []
        for age in range(1, 10):
            optimizer.step()
            ages.extend([age] * (len(caught) > len(ages)))
    assert ages == [6]
    assert "call optimizer.refresh_if_due(loss) in every iteration" in str(caught[0].message)


def test_a_sketch_renewed_on_time_never_warns():
    problem = Quadratic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descend(problem, fixed(problem.params, 1e-3, refresh_every=1), 5)


def reentrant(function: Callable[..., Tensor], inputs: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(function, inputs, use_reentrant=True)


WAYS_OUT = ("SDPBackend.MATH", "uncompiled model", "use_reentrant=False", "GaussNewton")


@pytest.mark.parametrize(
    "build",
    [
        Attention,
        partial(Attention, checkpoint=reentrant),
        lambda: torch.compile(Attention(), backend="aot_eager"),
    ],
    ids=["fused attention", "reentrant checkpoint", "compiled"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_graph_without_second_derivatives_is_refused_with_the_ways_out(build):
    model, data = seeded(build, torch.float32), batch(4, 5, 3, dtype=torch.float32)
    optimizer = fixed(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="no second derivative") as caught:
        optimizer.refresh_if_due(loss_of(model, data))
    assert all(way in str(caught.value) for way in WAYS_OUT)


def test_a_reentrant_checkpoint_is_refused_even_where_torch_would_drop_its_gradients_in_silence():
    layer, inputs = nn.Linear(3, 2).double(), batch()[0].requires_grad_()
    loss = reentrant(lambda rows: layer(rows).tanh(), inputs).square().sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fixed(layer.parameters(), 0.1).refresh(loss)


@pytest.mark.parametrize("way_out", ["function", "math kernel", "gauss-newton"])
def test_the_ways_out_work_on_a_transformer(way_out):
    model, data = seeded(Attention), batch(4, 5, 3)
    optimizer = fixed(model.parameters(), 0.1, power_iterations=20)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, _ = top_sketch(dense_hessian(model, data), 1)
        loss = loss_of(model, data)
    kind = way_out if way_out in SOURCES else "loss"
    optimizer.refresh(source_of(kind, model, data, loss))
    tolerance = 1e-6 if kind != "gauss-newton" else 0.5
    assert optimizer.sketch.values == pytest.approx(expected.tolist(), rel=tolerance)


def test_the_uncompiled_model_in_a_function_serves_a_compiled_one():
    model, data = smooth_network(), batch()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = fixed(compiled.parameters(), 0.1, rank=26)
    loss = loss_of(compiled, data)
    optimizer.refresh_if_due(lambda: loss_of(model, data))
    loss.backward()
    assert sorted(optimizer.sketch.values) == pytest.approx(
        torch.linalg.eigvalsh(dense_hessian(model, data)).tolist(), abs=1e-10
    )


@runs_compiled_models_eagerly
@pytest.mark.parametrize("kind", ["function", "gauss-newton"])
def test_a_compiled_model_is_run_uncompiled_in_a_refresh(kind):
    model, data = smooth_network(), batch()
    compiled = torch.compile(model, backend="aot_eager")
    loss_of(compiled, data).backward()
    values = []
    for network in (compiled, model):
        optimizer = fixed(model.parameters(), 0.1, rank=3)
        optimizer.refresh(source_of(kind, network, data, None))
        values.append(optimizer.sketch.values)
    assert values[0] == values[1]


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that torch's allocator had out at a time while running."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    sums = torch.tensor([size for _, size in changes]).cumsum(0)
    return int(sums.max())


def test_4096_samples_in_parts_need_the_memory_of_32():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)), torch.float32)
    optimizer = fixed(model.parameters(), 0.1, power_iterations=1)
    data = batch(4096, dtype=torch.float32)
    small = peak_bytes(lambda: optimizer.refresh(lambda: losses_of_parts(model, (data[0][:32], data[1][:32]), 32)))
    in_parts = peak_bytes(lambda: optimizer.refresh(lambda: losses_of_parts(model, data, 32)))
    at_once = peak_bytes(lambda: optimizer.refresh(lambda: loss_of(model, data)))
    assert in_parts < 1.1 * small
    assert at_once > 20 * small


def test_a_refresh_leaves_no_reference_cycle_behind():
    gc.collect()
    gc.disable()
    try:
        model, data = smooth_network(), batch()
        optimizer = fixed(model.parameters(), 0.1, rank=2)
        loss = loss_of(model, data)
        optimizer.refresh(loss)
        graph = weakref.ref(loss)
        loss.backward()
        del loss
        assert graph() is None
    finally:
        gc.enable()


def test_a_refresh_in_float32_agrees_with_one_in_float64():
    values = []
    for dtype in (torch.float32, torch.float64):
        model = smooth_network(dtype)
        optimizer = fixed(model.parameters(), 0.1, power_iterations=30)
        optimizer.refresh(loss_of(model, batch(dtype=dtype)))
        values.append(optimizer.sketch.values[0])
    assert values[0] == pytest.approx(values[1], rel=1e-5)

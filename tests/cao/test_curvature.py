import copy
import gc
import weakref

import hessian_eigenthings
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn.functional import cross_entropy, dropout, l1_loss, mse_loss

from cao import CAO, GaussNewton, Hessian, Lanczos, Mean
from cao.curvature.operators import Reordered
from cao.linalg.columns import HERE


def batch(samples: int = 12, features: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (samples,), generator=generator)


def network(*, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def outputs_at(model: nn.Module, point: Tensor, inputs: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    pieces = point.split([p.numel() for p in params.values()])
    replaced = {name: piece.view(p.shape) for (name, p), piece in zip(params.items(), pieces, strict=True)}
    return functional_call(model, replaced, (inputs,))


def dense_hessian(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return hessian(lambda point: cross_entropy(outputs_at(model, point, inputs), labels))(flat(model))


def dense_gauss_newton(model: nn.Module, inputs: Tensor, loss) -> Tensor:
    jacobian = jacrev(lambda point: outputs_at(model, point, inputs).reshape(-1))(flat(model))
    outputs = model(inputs).detach()
    curvature = hessian(loss)(outputs).reshape(outputs.numel(), outputs.numel())
    return jacobian.T @ curvature @ jacobian


def columns_for(model: nn.Module, k: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    return HERE.random(size, k, torch.Generator().manual_seed(1), dtype)


def parts(model: nn.Module, inputs: Tensor, labels: Tensor, size: int):
    for x, y in zip(inputs.split(size), labels.split(size), strict=True):
        yield cross_entropy(model(x), y)


@pytest.mark.parametrize("kind", ["loss", "function", "parts"])
def test_products_are_those_of_the_dense_hessian(kind):
    model, (inputs, labels) = network(), batch()
    source = {
        "loss": cross_entropy(model(inputs), labels),
        "function": lambda: cross_entropy(model(inputs), labels),
        "parts": lambda: parts(model, inputs, labels, 4),
    }[kind]
    columns = columns_for(model)
    torch.testing.assert_close(
        Hessian(source, model.parameters()) @ columns, dense_hessian(model, inputs, labels) @ columns
    )


def test_least_squares_has_its_closed_form():
    inputs, _ = batch()
    model = nn.Linear(4, 1, bias=False).double()
    loss = mse_loss(model(inputs).squeeze(), torch.ones(12, dtype=torch.float64))
    columns = columns_for(model)
    expected = 2 / 12 * inputs.T @ inputs @ columns
    torch.testing.assert_close(Hessian(loss, model.parameters()) @ columns, expected)
    operator = GaussNewton(model, inputs, lambda z: mse_loss(z.squeeze(), torch.ones(12, dtype=torch.float64)))
    torch.testing.assert_close(operator @ columns, expected)


def test_eigenvalues_agree_with_hessian_eigenthings():
    model, (inputs, labels) = network().eval(), batch()
    theirs = hessian_eigenthings.lanczos(
        hessian_eigenthings.HessianOperator(model, [(inputs, labels)], lambda m, b: cross_entropy(m(b[0]), b[1])),
        k=3,
        max_iter=40,
        tol=1e-10,
        seed=0,
    )
    ours = Lanczos(30)(Hessian(cross_entropy(model(inputs), labels), model.parameters()), columns_for(model))
    torch.testing.assert_close(
        ours.values.abs().sort().values, theirs.eigenvalues.abs().sort().values.double(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("forward_mode", [True, False])
@pytest.mark.parametrize("norm", [False, True])
def test_gauss_newton_products_are_those_of_the_dense_matrix(forward_mode, norm):
    model, (inputs, labels) = network(norm=norm).eval(), batch()
    operator = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
    operator._use_forward_mode = forward_mode
    columns = columns_for(model)
    expected = dense_gauss_newton(model, inputs, lambda outputs: cross_entropy(outputs, labels)) @ columns
    torch.testing.assert_close(operator @ columns, expected)


def test_forward_and_reverse_mode_agree_with_batch_norm_and_dropout_in_training():
    model, (inputs, labels) = network(dropout=0.5, norm=True).train(), batch()
    by_forward, by_reverse = (GaussNewton(model, inputs, lambda z: cross_entropy(z, labels)) for _ in range(2))
    by_reverse._use_forward_mode = False
    columns = columns_for(model)
    torch.testing.assert_close(by_forward @ columns, by_reverse @ columns)
    assert by_forward._use_forward_mode


def test_gauss_newton_of_cross_entropy_is_positive_semidefinite():
    model, (inputs, labels) = network(norm=True).train(), batch()
    operator = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
    size = flat(model).numel()
    matrix = operator @ torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.recurrent(inputs)[0][:, -1])


def test_an_lstm_agrees_with_central_differences_of_its_outputs():
    model, labels = Recurrent(), batch(6)[1]
    inputs = torch.randn(6, 7, 4)
    column = columns_for(model, 1, torch.float32)
    product = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels)) @ column
    exact = Recurrent().double()
    outputs, direction, step = exact(inputs.double()), column[:, 0].double(), 1e-5
    there, back = (displaced(exact, direction, sign * step)(inputs.double()) for sign in (1, -1))
    tangent = ((there - back) / (2 * step)).detach()
    curvature = hessian(lambda z: cross_entropy(z, labels))(outputs.detach()).reshape(18, 18)
    weights = (curvature @ tangent.reshape(-1)).view_as(outputs)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(outputs, list(exact.parameters()), weights)])
    torch.testing.assert_close(product[:, 0], expected.float(), rtol=1e-3, atol=1e-4)


def displaced(model: nn.Module, direction: Tensor, step: float) -> nn.Module:
    other = copy.deepcopy(model)
    pieces = direction.split([p.numel() for p in other.parameters()])
    with torch.no_grad():
        for parameter, piece in zip(other.parameters(), pieces, strict=True):
            parameter += step * piece.view_as(parameter)
    return other


class Cube(torch.autograd.Function):
    """Has a derivative in reverse mode only."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def test_a_layer_without_a_forward_derivative_is_served_by_reverse_mode():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, inputs: Tensor) -> Tensor:
            return Cube.apply(self.weight * inputs)

    operator = GaussNewton(Model(), torch.ones(2), lambda outputs: outputs.square().sum() / 2)
    torch.testing.assert_close(operator @ torch.eye(2), torch.diag(torch.tensor([9.0, 144.0])))
    assert not operator._use_forward_mode


@pytest.mark.parametrize("training", [True, False])
def test_gauss_newton_runs_attention_without_being_told(training):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).double()
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(40, 3).double()).train(training)
    inputs, labels = torch.randn(6, 5, 8, dtype=torch.float64), batch(6)[1]
    by_forward, by_reverse = (GaussNewton(model, inputs, lambda z: cross_entropy(z, labels)) for _ in range(2))
    by_reverse._use_forward_mode = False
    columns = columns_for(model, 1)
    torch.testing.assert_close(by_forward @ columns, by_reverse @ columns)


def test_the_mean_of_operators_is_the_operator_of_the_joined_batch():
    model, (inputs, labels) = network(), batch()
    pieces = [
        GaussNewton(model, x, lambda z, y=y: cross_entropy(z, y))
        for x, y in zip(inputs.split(4), labels.split(4), strict=True)
    ]
    whole = GaussNewton(model, inputs, lambda z: cross_entropy(z, labels))
    columns = columns_for(model)
    torch.testing.assert_close(Mean(pieces) @ columns, whole @ columns)


def test_a_mean_puts_its_operators_into_one_order_and_refuses_other_parameters():
    model, (inputs, labels) = network(), batch()
    loss = lambda outputs: cross_entropy(outputs, labels)  # noqa: E731
    forwards = GaussNewton(model, inputs, loss)
    backwards = GaussNewton(model, inputs, loss, reversed(list(model.parameters())))
    columns = columns_for(model)
    torch.testing.assert_close(Mean([forwards, backwards]) @ columns, forwards @ columns)
    with pytest.raises(ValueError, match="of a mean must act on the same parameters; it lacks 3 of them and has 0 oth"):
        Mean([forwards, GaussNewton(model, inputs, loss, [model[0].weight])])


class Rescaled(nn.Module):
    """A layer divided by a number that it does not differentiate, as in quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.inner[0].weight.abs().amax()
        return self.inner(inputs) / scale


def test_what_the_model_does_without_gradients_counts_as_constant():
    model, (inputs, labels) = Rescaled(), batch()
    scale = model.inner[0].weight.detach().abs().amax()
    loss = lambda outputs: cross_entropy(outputs, labels)  # noqa: E731
    expected = dense_gauss_newton(model.inner, inputs, lambda outputs: loss(outputs / scale))
    product = GaussNewton(model, inputs, loss) @ columns_for(model)
    torch.testing.assert_close(product, expected @ columns_for(model))


def test_a_random_loss_of_the_outputs_moves_no_stream_and_is_the_same_in_every_product():
    model, (inputs, labels) = network(), batch()
    norm = nn.BatchNorm1d(3).double()
    matrix = GaussNewton(model, inputs, lambda outputs: cross_entropy(dropout(norm(outputs), 0.5), labels))
    before = torch.random.get_rng_state()
    torch.testing.assert_close(matrix @ columns_for(model), matrix @ columns_for(model), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert norm.num_batches_tracked == 0


def test_reordered_parameters_give_a_permuted_matrix():
    model, (inputs, labels) = network(), batch()
    params = list(model.parameters())
    shuffled = [params[i] for i in (2, 0, 3, 1)]
    identity = torch.eye(flat(model).numel(), dtype=torch.float64)
    loss = cross_entropy(model(inputs), labels)
    torch.testing.assert_close(
        Reordered(Hessian(loss, shuffled), params) @ identity, dense_hessian(model, inputs, labels)
    )


def test_a_linear_loss_has_a_zero_hessian():
    weight = nn.Parameter(torch.ones(3))
    assert torch.equal(Hessian(weight.sum(), [weight]) @ torch.eye(3), torch.zeros(3, 3))


def test_a_loss_linear_in_the_outputs_has_a_zero_gauss_newton_matrix():
    model, (inputs, _) = network(), batch()
    operator = GaussNewton(model, inputs, lambda outputs: l1_loss(outputs, torch.zeros_like(outputs)))
    assert not (operator @ columns_for(model)).any()


def test_unused_parameters_have_zero_rows():
    used, unused = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.ones(2))
    product = Hessian((used**3).sum(), [unused, used]) @ torch.eye(3)
    assert torch.equal(product, torch.diag(torch.tensor([0.0, 0.0, 12.0])))


def test_shared_parameters_count_once():
    first, last = (nn.Linear(3, 3, bias=False).double() for _ in range(2))
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last)
    inputs, labels = batch(features=3)
    columns = columns_for(model)
    expected = dense_hessian(model, inputs, labels) @ columns
    torch.testing.assert_close(Hessian(cross_entropy(model(inputs), labels), model.parameters()) @ columns, expected)
    gauss_newton = dense_gauss_newton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
    operator = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
    torch.testing.assert_close(operator @ columns, gauss_newton @ columns)


def test_the_graph_of_the_loss_is_built_on_once_for_all_products():
    model, (inputs, labels) = network(), batch()
    calls = 0

    def forward_counted() -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(model(inputs), labels)

    operator = Hessian(forward_counted, model.parameters())
    operator @ columns_for(model, 5)
    operator @ columns_for(model, 5)
    assert calls == 2


def test_a_product_never_writes_gradients_and_leaves_the_backward_pass_usable():
    model, (inputs, labels) = network(norm=True).train(), batch()
    loss = cross_entropy(model(inputs), labels)
    Hessian(loss, model.parameters()) @ columns_for(model)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    reference = network(norm=True).train()
    cross_entropy(reference(inputs), labels).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_parts_are_held_in_memory_one_at_a_time():
    model, (inputs, labels) = network(), batch()
    graphs: list[weakref.ref[Tensor]] = []

    def counted_parts():
        for loss in parts(model, inputs, labels, 2):
            assert not any(graph() is not None for graph in graphs)
            graphs.append(weakref.ref(loss))
            yield loss
            del loss

    gc.disable()
    try:
        Hessian(counted_parts, model.parameters()) @ columns_for(model)
    finally:
        gc.enable()
    assert len(graphs) == 6


def test_products_of_a_bfloat16_model_are_accumulated_in_float32():
    model, (inputs, labels) = network().bfloat16(), batch()
    loss = cross_entropy(model(inputs.bfloat16()), labels)
    columns = columns_for(model, dtype=torch.float32)
    product = Hessian(loss, model.parameters()) @ columns
    assert product.dtype == torch.float32
    exact = dense_hessian(network(), inputs, labels).float() @ columns
    assert (product - exact).norm() < 0.05 * exact.norm()


def test_inputs_may_be_a_tuple_or_a_mapping():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left * self.weight + right

    left, right = torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2)
    expected = torch.diag(torch.tensor([1.0, 9.0]))
    for inputs in ((left, right), {"left": left, "right": right}):
        product = GaussNewton(Sum(), inputs, lambda z: 0.5 * z.square().sum()) @ torch.eye(2)
        torch.testing.assert_close(product, expected)


def exhausted():
    yield torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.ones(3, requires_grad=True), r"scalar tensor, got shape \(3,\)"),
        (torch.ones(()), "has no graph"),
        (exhausted(), "pass a generator function itself"),
        (42, "got int"),
    ],
)
def test_bad_sources_are_refused_with_a_reason(source, message):
    with pytest.raises(ValueError, match=message):
        Hessian(source, [torch.ones(3, requires_grad=True)])


def test_a_function_that_returns_a_used_up_generator_is_refused():
    weight = torch.ones(3, requires_grad=True)
    generator = ((weight**2).sum() for _ in range(2))
    operator = Hessian(lambda: generator, [weight])
    operator @ torch.eye(3)
    with pytest.raises(ValueError, match="got 0 where 2 were expected; let each call return a new generator"):
        operator @ torch.eye(3)


def test_a_function_that_returns_no_tensor_is_refused():
    with pytest.raises(ValueError, match="the loss must be a scalar tensor, got float"):
        Hessian(lambda: iter([1.0]), [torch.ones(3, requires_grad=True)]) @ torch.eye(3)


def test_columns_of_the_wrong_length_are_refused():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"expected columns of shape \(3, k\), got \(2, 2\)"):
        Hessian((weight**2).sum(), [weight]) @ torch.eye(2)


def test_gauss_newton_refuses_foreign_parameters_and_structured_outputs():
    model, (inputs, _) = network(), batch()
    with pytest.raises(ValueError, match=r"must be parameters of the model, got others of shapes \[\(2,\)\]"):
        GaussNewton(model, inputs, torch.sum, params=[torch.ones(2)])
    with pytest.raises(ValueError, match="must return a tensor, got tuple; wrap it"):
        GaussNewton(nn.LSTM(4, 5).double(), inputs, torch.sum) @ torch.ones(220, 1).double()


@pytest.mark.parametrize("way_out", ["math kernel", "function"])
def test_attention_without_second_derivative_is_explained_and_the_ways_out_work(way_out):
    query = torch.randn(1, 2, 5, 8, requires_grad=True)

    def loss() -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query).square().sum()

    columns = torch.ones(80, 1)
    with pytest.raises(RuntimeError, match=r"no second derivative.*sdpa_kernel\(SDPBackend.MATH\)"):
        Hessian(loss(), [query]) @ columns
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        source = loss() if way_out == "math kernel" else loss
    assert (Hessian(source, [query]) @ columns).isfinite().all()


def test_a_mean_leaves_what_its_operators_return_alone() -> None:
    class Stored:
        params = (torch.zeros(3, requires_grad=True),)

        def __init__(self, product: torch.Tensor) -> None:
            self.product = product

        def __matmul__(self, _columns: torch.Tensor) -> torch.Tensor:
            return self.product

    ones, twos = Stored(torch.ones(3, 1)), Stored(2 * torch.ones(3, 1))
    assert torch.equal(Mean([ones, twos]) @ torch.ones(3, 1), 1.5 * torch.ones(3, 1))
    assert torch.equal(ones.product, torch.ones(3, 1))


def test_tied_parameters_count_once_in_any_curvature() -> None:
    model, (inputs, labels) = network(), batch()
    twice, columns = [*model.parameters(), *model.parameters()], torch.eye(43, dtype=torch.float64)
    hessian_of_all = Hessian(lambda: cross_entropy(model(inputs), labels), twice)
    torch.testing.assert_close(hessian_of_all @ columns, dense_hessian(model, inputs, labels))
    gauss_newton = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels), twice)
    expected = dense_gauss_newton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
    torch.testing.assert_close(gauss_newton @ columns, expected)


def test_an_operator_that_lists_a_parameter_twice_is_refused_by_name() -> None:
    class Twice:
        def __init__(self, param: nn.Parameter) -> None:
            self.params = [param, param]

        def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:
            return columns

    param = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="it has 1 of them twice: list each one once"):
        CAO([param], lr=0.1).refresh(Twice(param))

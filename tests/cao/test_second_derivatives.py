"""Layers that can be differentiated only once: the Hessian refuses them where it can, Gauss-Newton is right."""

import re
import warnings

import numpy as np
import pytest
import torch
from small_models import batch, dense_hessian, fixed, flat_params, loss_of, seeded, smooth_network
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, weight_norm

from cao import GaussNewton, Hessian
from cao.autograd.derivatives import NoSecondDerivativeError, with_way_out
from cao.sketch.making import SymmetryProbe


class Fourth(Function):
    """x⁴, whose backward pass cannot be differentiated, and says so."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs**4

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 4 * ctx.saved_tensors[0] ** 3 * gradient


class Kernel(Function):
    """tanh, with a backward pass that leaves torch, as a kernel of one's own does."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs.tanh()

    @staticmethod
    def backward(ctx, gradient):
        slope = 1 - np.tanh(ctx.saved_tensors[0].detach().numpy()) ** 2
        return torch.from_numpy(gradient.detach().numpy() * slope)


class Layer(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def network(function) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), Layer(function), nn.Linear(4, 2)))


def dense_gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return Jᵀ(∇²ℓ)J, with J by central differences of the outputs."""
    theta, columns = flat_params(model), []
    with torch.no_grad():
        for unit in torch.eye(len(theta), dtype=theta.dtype):
            ends = []
            for sign in (1, -1):
                nn.utils.vector_to_parameters(theta + sign * 1e-5 * unit, model.parameters())
                ends.append(model(data[0]).reshape(-1))
            columns.append((ends[0] - ends[1]) / 2e-5)
        nn.utils.vector_to_parameters(theta, model.parameters())
        outputs = model(data[0])
    jacobian = torch.stack(columns, dim=1)
    curvature = torch.func.hessian(lambda z: cross_entropy(z.view(outputs.shape), data[1]))(outputs.reshape(-1))
    return jacobian.T @ curvature @ jacobian


@pytest.mark.parametrize("after", [torch.sum, lambda values: values.cos().sum()], ids=["linear", "nonlinear"])
@pytest.mark.parametrize("is_function", [False, True])
def test_a_function_marked_once_differentiable_is_refused_by_name(after, is_function):
    theta = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return after(Fourth.apply(theta)) + theta.square().sum() / 2

    with pytest.raises(RuntimeError, match=r"no second derivative \(FourthBackward is marked @once_diff.*GaussNewton"):
        fixed([theta], 0.1).refresh(loss if is_function else loss())


def test_a_layer_that_leads_to_no_parameter_of_ours_is_no_obstacle():
    ours, theirs = torch.ones(2, dtype=torch.float64).requires_grad_(), torch.ones(2).requires_grad_()
    optimizer = fixed([ours], 0.1)
    optimizer.refresh((ours * Fourth.apply(theirs)).square().sum())
    assert optimizer.sketch.values == pytest.approx([2.0])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("wrap", [weight_norm, parametrizations.weight_norm], ids=["old", "new"])
@pytest.mark.parametrize("dim", [0, 1])
def test_weight_normalisation_is_refused_because_torch_differentiates_it_wrongly(wrap, dim):
    model, data = wrap(seeded(lambda: nn.Linear(3, 2)), dim=dim), batch()
    with pytest.raises(RuntimeError, match=r"weight_norm takes the norm for a constant.*GaussNewton"):
        fixed(model.parameters(), 0.1).refresh(loss_of(model, data))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: network(Fourth.apply),
        lambda: network(Kernel.apply),
        lambda: weight_norm(seeded(lambda: nn.Linear(3, 2)), dim=0),
        lambda: weight_norm(seeded(lambda: nn.Linear(3, 2)), dim=1),
        lambda: weight_norm(seeded(lambda: nn.Linear(3, 2)), dim=None),
    ],
    ids=["once differentiable", "kernel", "weight norm", "weight norm, columns", "weight norm, whole"],
)
def test_gauss_newton_is_right_where_the_hessian_is_not(build):
    model, data = build(), batch()
    size = len(flat_params(model))
    operator = GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))
    product = operator @ torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(product, dense_gauss_newton(model, data), rtol=1e-6, atol=1e-8)


def test_gauss_newton_serves_bags_of_embeddings_and_leaves_their_norm_alone():
    model = seeded(lambda: nn.Sequential(nn.EmbeddingBag(6, 3, max_norm=1.0), nn.Linear(3, 2)))
    words, labels = torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1])
    before = model[0].weight.detach().clone()
    product = GaussNewton(model, words, lambda outputs: cross_entropy(outputs, labels)) @ torch.eye(
        26, dtype=torch.float64
    )
    assert torch.equal(model[0].weight, before)
    model[0].max_norm = None
    torch.testing.assert_close(product, dense_gauss_newton(model, (words, labels)), rtol=1e-6, atol=1e-8)


def test_gauss_newton_refuses_what_no_way_of_differentiation_agrees_on():
    def hidden(inputs: Tensor) -> Tensor:
        return Fourth.apply(inputs) / inputs.detach().abs().mean()

    model, data = network(hidden), batch()
    operator = GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))
    with pytest.raises(RuntimeError, match="contradict its backward pass; give the Function of that layer a jvp"):
        operator @ torch.eye(26, dtype=torch.float64)


def probed(matrix: Tensor, *blocks: Tensor) -> float:
    probe = SymmetryProbe(DenseOperator(matrix))
    for block in blocks:
        probe @ block
    return probe.asymmetry


class DenseOperator:
    params = ()

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns


def test_the_asymmetry_of_a_matrix_is_the_largest_difference_over_the_largest_product():
    matrix = torch.tensor([[1.0, 2.0], [0.0, 5.0]], dtype=torch.float64)
    # With v = (1, 0): vᵀMw = (1, 2) against wᵀMv = (1, 0) for w = v and w = (0, 1).
    assert probed(matrix, torch.eye(2, dtype=torch.float64)) == pytest.approx(2.0)
    assert probed(matrix + matrix.T, torch.eye(2, dtype=torch.float64)) == 0.0
    assert probed(0 * matrix, torch.eye(2, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("width", [1, 3])
def test_two_blocks_in_a_row_tell_a_true_hessian_from_a_broken_one(width):
    figures = []
    for function in (torch.tanh, Kernel.apply):
        model, data = network(function), batch()
        probe = SymmetryProbe(Hessian(loss_of(model, data), model.parameters()))
        start = torch.randn(26, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        probe @ torch.linalg.qr(probe @ start).Q
        figures.append(probe.asymmetry)
    assert figures[0] < 1e-10
    assert figures[1] > 0.1


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("eigensolver", ["subspace", "lanczos"])
def test_a_hessian_that_is_not_symmetric_warns_once_with_the_figure_and_names_gauss_newton(rank, eigensolver):
    model, data = network(Kernel.apply), batch()
    optimizer = fixed(model.parameters(), 0.1, rank=rank, eigensolver=eigensolver)
    with pytest.warns(UserWarning, match=r"symmetric.*0\.\d+.*GaussNewton"):
        optimizer.refresh(loss_of(model, data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.refresh(loss_of(model, data))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_true_hessian_never_warns(rank, dtype):
    model, data = smooth_network(dtype), batch(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed(model.parameters(), 0.1, rank=rank).refresh(loss_of(model, data))


def test_a_backward_pass_that_detaches_what_it_saved_costs_the_hessian_a_symmetric_part():
    """This cannot be seen in the products: what is missing is f''(h)·δ, a symmetric matrix. The docs must say so."""

    class Detached(Function):
        @staticmethod
        def forward(ctx, inputs):
            ctx.save_for_backward(inputs)
            return inputs.tanh()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1 - ctx.saved_tensors[0].detach().tanh() ** 2)

    model, data = network(Detached.apply), batch()
    found = Hessian(loss_of(model, data), model.parameters()) @ torch.eye(26, dtype=torch.float64)
    exact = dense_hessian(network(torch.tanh), data)
    torch.testing.assert_close(found, found.T)
    assert (found - exact).norm() > 0.1 * exact.norm()
    operator = GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))
    torch.testing.assert_close(
        operator @ torch.eye(26, dtype=torch.float64), dense_gauss_newton(model, data), rtol=1e-6, atol=1e-8
    )


def test_the_refusal_of_a_compiled_backward_pass_that_gave_its_buffers_away_names_the_ways_out():
    error = with_way_out(RuntimeError("This backward function was compiled with non-empty donated buffers"))
    assert isinstance(error, NoSecondDerivativeError)
    assert re.search(r"no second derivative .*donated buffers.*uncompiled model", str(error))


class Cube(Function):
    """x³, by operations that can be differentiated again."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def test_the_graph_of_a_loss_is_walked_once_however_many_products_follow(monkeypatch):
    """A walk asks every node for its name."""
    asked = []
    monkeypatch.setattr(Cube._backward_cls, "name", lambda _node: asked.append(1) or "Cube", raising=False)
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    hessian = Hessian(Cube.apply(theta).sum(), [theta])
    counts = []
    for _ in range(4):
        torch.testing.assert_close(hessian @ torch.eye(3, dtype=torch.float64), 6 * torch.eye(3, dtype=torch.float64))
        counts.append(len(asked))
    assert counts[0] > 0
    assert counts == [counts[0]] * 4

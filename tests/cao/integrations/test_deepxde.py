import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from cao.integrations.deepxde import residuals_of, sketched_lbfgs

EXAMPLE = Path(__file__).parents[3] / "examples/deepxde_poisson.py"


@pytest.fixture(scope="module")
def dde() -> Iterator[ModuleType]:
    """DeepXDE on torch in double precision, and torch's own default put back."""
    patch, dtype = pytest.MonkeyPatch(), torch.get_default_dtype()
    patch.setenv("DDE_BACKEND", "pytorch")
    import deepxde  # noqa: PLC0415  # It reads the variable when it is imported.

    deepxde.config.set_default_float("float64")
    yield deepxde
    deepxde.config.set_default_float("float32")
    torch.set_default_dtype(dtype)
    patch.undo()


def poisson(dde: ModuleType):
    """Return −u″ = π² sin πx with two boundary conditions, and a network for it."""
    line = dde.geometry.Interval(-1, 1)

    def pde(x, u):
        return dde.grad.hessian(u, x) + np.pi**2 * torch.sin(np.pi * x)

    condition = dde.icbc.DirichletBC(line, lambda _: 0.0, lambda _, on_boundary: on_boundary)
    data = dde.data.PDE(line, pde, condition, 16, 2)
    dde.config.set_random_seed(0)
    return dde.Model(data, dde.nn.FNN([1, 10, 10, 1], "tanh", "Glorot normal"))


@pytest.mark.parametrize("weights", [None, [1.0, 100.0]])
def test_the_squares_of_the_residuals_add_up_to_the_loss_of_deepxde(dde, weights):
    model = poisson(dde)
    model.compile(sketched_lbfgs(model), loss_weights=weights, verbose=0)
    model.train(iterations=1, verbose=0)
    state = model.train_state
    losses = model.outputs_losses_train(state.X_train, state.y_train, state.train_aux_vars)[1]
    own = torch.stack([part.square().sum() for part in residuals_of(model)])
    torch.testing.assert_close(own, losses)


def test_deepxde_trains_further_than_with_its_own_l_bfgs(dde):
    ends = []
    for is_sketched in (False, True):
        model = poisson(dde)
        if is_sketched:
            model.compile(sketched_lbfgs(model, max_iter=10), verbose=0)
            model.train(iterations=20, verbose=0)
            assert model.opt.status.refreshes > 0
            assert model.opt.status.iterations <= 200
        else:
            dde.optimizers.set_LBFGS_options(maxiter=200, ftol=0, gtol=0)
            model.compile("L-BFGS", verbose=0)
            model.train(verbose=0)
        ends.append(float(np.sum(model.train_state.loss_train)))
    assert ends[1] < ends[0] / 10


def test_an_unknown_of_the_equation_is_found(dde):
    """−u″ = a sin πx with u = sin πx observed: a = π²."""
    line = dde.geometry.Interval(-1, 1)
    unknown = dde.Variable(1.0)
    points = np.linspace(-1, 1, 20)[:, None]
    observed = dde.icbc.PointSetBC(points, np.sin(np.pi * points))

    def pde(x, u):
        return dde.grad.hessian(u, x) + unknown * torch.sin(np.pi * x)

    data = dde.data.PDE(line, pde, observed, 20, 2, anchors=points)
    dde.config.set_random_seed(0)
    model = dde.Model(data, dde.nn.FNN([1, 10, 10, 1], "tanh", "Glorot normal"))
    optimizer = sketched_lbfgs(model, [unknown])
    model.compile(optimizer, external_trainable_variables=[unknown], verbose=0)
    model.train(iterations=15, verbose=0)
    assert unknown.item() == pytest.approx(np.pi**2, rel=1e-2)


def test_a_deep_operator_network_is_trained(dde):
    """The antiderivatives of a few cosines: the inputs are functions and places, not one table of points."""
    places = np.linspace(0, 1, 8)[:, None]
    rates = np.arange(1, 6)[:, None]
    functions, values = np.cos(rates * places.T), np.sin(rates * places.T) / rates
    data = dde.data.TripleCartesianProd((functions, places), values, (functions, places), values)
    dde.config.set_random_seed(0)
    model = dde.Model(data, dde.nn.DeepONetCartesianProd([8, 10, 10], [1, 10, 10], "tanh", "Glorot normal"))
    model.compile(sketched_lbfgs(model, max_iter=5), verbose=0)
    history, _ = model.train(iterations=4, verbose=0)
    state = model.train_state
    losses = model.outputs_losses_train(state.X_train, state.y_train, state.train_aux_vars)[1]
    torch.testing.assert_close(torch.stack([part.square().sum() for part in residuals_of(model)]), losses)
    assert model.opt.status.refreshes > 0
    assert np.sum(history.loss_train[-1]) < np.sum(history.loss_train[0]) / 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "MAE"}, r'mean squared errors .* compile with loss="MSE"'),
        ({"loss_weights": [1.0, -1.0]}, r"loss_weights must not be negative, got \[1.0, -1.0\]"),
    ],
)
def test_a_loss_that_is_no_sum_of_squares_is_refused(dde, settings, message):
    model = poisson(dde)
    model.compile(sketched_lbfgs(model), **settings, verbose=0)
    with pytest.raises(ValueError, match=message):
        model.train(iterations=1, verbose=0)


def test_a_loss_changed_by_a_second_compile_is_refused(dde):
    model = poisson(dde)
    optimizer = sketched_lbfgs(model)
    model.compile(optimizer, verbose=0)
    model.train(iterations=1, verbose=0)
    model.compile(sketched_lbfgs(model), loss="MAE", verbose=0)
    with pytest.raises(ValueError, match="MSE"):
        model.train(iterations=1, verbose=0)


def test_the_example_solves_its_equation(dde, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert float(capsys.readouterr().out.split("relative error ")[1].split()[0]) < 1e-3

"""What a fit tells while it runs, and how it is stopped."""

import pytest
import torch

import cao
from cao import Ending, State

T = torch.linspace(0, 3, 40, dtype=torch.float64)
METHODS = ["trust-region", "sketched-lbfgs"]


def start() -> torch.Tensor:
    return torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64, requires_grad=True)


def decay(p: torch.Tensor) -> torch.Tensor:
    return p[0] * torch.exp(-p[1] * T) + p[2] - 2.5 * torch.exp(-1.3 * T) - 0.1 * torch.sin(9 * T)


@pytest.mark.parametrize("method", METHODS)
def test_the_callback_sees_each_iteration_with_its_parameters_in_place(method):
    p, seen = start(), []

    def callback(state: State) -> None:
        assert state.loss == pytest.approx(float(decay(p).detach().square().sum()), rel=1e-12)
        seen.append(state)

    found = cao.fit(lambda: decay(p), [p], method=method, callback=callback)
    assert [state.iteration for state in seen] == list(range(1, found.iterations + 1))
    assert seen == found.history
    assert seen[-1].loss == found.loss


def test_the_gradient_of_a_state_is_that_where_its_iteration_began():
    p = start()
    found = cao.fit(lambda: decay(p), [p], bounds={p: (-0.1, 2.0)})
    again = start()
    residuals = decay(again)
    (gradient,) = torch.autograd.grad(residuals.square().sum(), again)
    assert found.history[0].gradient_norm == pytest.approx(float(gradient.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["returns True", "raises StopIteration"])
def test_the_callback_may_stop_the_fit(method, way):
    def callback(state: State) -> bool:
        if way == "raises StopIteration" and state.iteration == 3:
            raise StopIteration
        return state.iteration == 3

    p = start()
    found = cao.fit(lambda: decay(p), [p], method=method, callback=callback)
    assert (found.reason, found.iterations, found.converged) == (Ending.STOPPED, 3, False)


@pytest.mark.parametrize("method", METHODS)
def test_weights_may_change_in_the_callback(method):
    p, weight = start(), torch.ones(40, dtype=torch.float64)

    def callback(state: State) -> None:
        if state.iteration == 3:
            weight[:20] = 5.0

    found = cao.fit(lambda: weight * decay(p), [p], method=method, callback=callback, gtol=1e-10, ftol=1e-13)
    changed = p.detach().clone()
    again = start()
    expected = cao.fit(lambda: weight * decay(again), [again], method="trust-region")
    assert found.converged
    assert found.loss == pytest.approx(expected.loss, rel=1e-8)
    torch.testing.assert_close(changed, again.detach(), rtol=1e-4, atol=1e-5)


def test_a_verbose_fit_prints_a_line_for_each_iteration_or_sketch(capsys):
    for method in METHODS:
        p = start()
        found = cao.fit(lambda p=p: decay(p), [p], method=method, verbose=True)
        lines = capsys.readouterr().out.splitlines()
        wanted = found.iterations if method == "trust-region" else len({s.refreshes for s in found.history})
        assert len(lines) == wanted
        assert all("loss" in line for line in lines)


def test_a_silent_fit_prints_nothing(capsys):
    p = start()
    cao.fit(lambda: decay(p), [p])
    assert capsys.readouterr().out == ""


def test_what_cannot_be_called_is_no_callback():
    with pytest.raises(TypeError, match="callback must be a function of the state, got int"):
        cao.fit(lambda: decay(p), [p := start()], callback=3)

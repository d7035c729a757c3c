import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn

from cao import CAO, Eigenpairs, Hessian
from cao_lab.config import ConfigError
from cao_lab.optimizer_config import optimizer_configs
from cao_lab.runs.methods.cao import CAOConfig, CAODefaultsConfig
from cao_lab.runs.methods.first_order import (
    AdaHessianConfig,
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    SGDConfig,
    SOAPConfig,
)
from cao_lab.runs.methods.lbfgs import LBFGSConfig
from cao_lab.runs.refresh import control
from cao_lab.runs.stepper import clip_with_decay


class Quadratic(nn.Module):
    """½ Σ hᵢ θᵢ², whose Hessian is diag(h)."""

    is_curvature_of_the_graph = True

    def __init__(self, curvature):
        super().__init__()
        self.theta = nn.Parameter(torch.ones(len(curvature), dtype=torch.float64))
        self.register_buffer("h", torch.tensor(curvature, dtype=torch.float64))

    def __call__(self, *, is_differentiated_twice=False):
        return (self.h * self.theta**2).sum() / 2

    def curvature(self, loss):
        return Hessian(self if loss is None else loss, [self.theta])

    def value(self, loss):
        return loss


def steps(config, objective, count=1):
    method = config.build(objective, 0)
    seen = []
    for _ in range(count):
        method.step(objective, seen.append)
    return method, seen


@pytest.mark.parametrize("name", sorted(set(optimizer_configs()) - {"muon"}))
def test_every_optimizer_lowers_a_quadratic(name):
    objective = Quadratic([4.0, 1.0, 0.5])
    steps(optimizer_configs()[name](), objective, count=5)
    assert objective().item() < 2.75


def test_matched_sgd_is_cao_of_rank_0_even_where_it_is_clipped():
    """Rate α/η, no momentum, gradient clipped at ηc: the control that separates curvature from learning rate."""
    ours, theirs = Quadratic([30.0, 1.0]), Quadratic([30.0, 1.0])
    cao = CAOConfig(rank=0, lr=0.01, damping=0.1, max_update_norm=50.0, weight_decay=0.1)
    steps(cao, ours, count=4)
    steps(SGDConfig(lr=0.1, momentum=0, max_gradient_norm=5.0, weight_decay=0.1), theirs, count=4)
    torch.testing.assert_close(ours.theta, theirs.theta, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (CAODefaultsConfig(lr=0.01, weight_decay=0.1), SGDConfig(lr=0.01, weight_decay=0.1)),
    ],
)
def test_cao_with_defaults_is_its_base_where_nothing_is_sharp_for_the_rate(config, base):
    """The gradient of 30 is clipped at first, as the base's is."""
    ours, theirs = Quadratic([30.0, 1.0]), Quadratic([30.0, 1.0])
    method, _ = steps(config, ours, count=30)
    steps(base, theirs, count=30)
    assert method.hessian_products() > 0
    torch.testing.assert_close(ours.theta, theirs.theta, rtol=1e-12, atol=0)


def test_cao_with_defaults_survives_a_rate_at_which_sgd_diverges_and_tells_of_its_sketch():
    ours, theirs = Quadratic([30.0, 1.0]), Quadratic([30.0, 1.0])
    settings = {"lr": 0.5, "max_gradient_norm": None, "weight_decay": 0.0}
    _, seen = steps(CAODefaultsConfig(**settings), ours, count=100)
    steps(SGDConfig(**settings), theirs, count=100)
    assert ours().item() < 1e-3
    assert theirs().item() > 1e9
    assert seen[0].eigenpairs().values[0].item() == pytest.approx(30.0)


def test_clipping_counts_the_weight_decay():
    param = nn.Parameter(torch.tensor([3.0, 0.0]))
    param.grad = torch.tensor([0.0, 4.0])
    clip_with_decay([param], decay=1.0, max_norm=1.0)
    torch.testing.assert_close(param.grad + 1.0 * param, torch.tensor([0.6, 0.8]))


def test_clipping_leaves_a_short_gradient_alone():
    param = nn.Parameter(torch.tensor([0.0, 0.0]))
    param.grad = torch.tensor([0.3, 0.4])
    clip_with_decay([param], decay=0.5, max_norm=1.0)
    torch.testing.assert_close(param.grad, torch.tensor([0.3, 0.4]))


def test_cao_tells_of_its_refresh_and_counts_products():
    method, seen = steps(CAOConfig(rank=1, power_iterations=30), Quadratic([4.0, 1.0, 0.5]))
    assert [round(pair, 6) for pair in seen[0].eigenpairs().values.tolist()] == [4.0]
    assert (method.hessian_products(), method.refreshes()) == (31, 1)


def test_projected_out_control_does_not_move_along_the_top_direction():
    objective = Quadratic([4.0, 1.0, 0.5])
    config = CAOConfig(sketch="projected-out", power_iterations=60, lr=0.1, damping=1.0, weight_decay=0.0)
    _, seen = steps(config, objective)
    assert objective.theta[0].item() == pytest.approx(1.0, abs=1e-9)
    assert objective.theta[1].item() == pytest.approx(0.9, abs=1e-9)
    assert seen[0].eigenpairs().values.tolist() == pytest.approx([4.0])


def test_random_control_keeps_the_eigenvalues_and_takes_other_directions():
    true = Eigenpairs(torch.tensor([5.0, 2.0]), torch.eye(50)[:, :2], torch.zeros(2), products=7)
    drawn = control(true, CAOConfig(sketch="random", rank=2), torch.Generator().manual_seed(0))
    assert drawn.values.tolist() == [5.0, 2.0]
    assert drawn.products == 7
    torch.testing.assert_close(drawn.vectors.T @ drawn.vectors, torch.eye(2))
    assert drawn.vectors[:2].abs().max() < 0.7


def test_lbfgs_counts_on_its_closure():
    objective = Quadratic([100.0, 1.0])
    steps(LBFGSConfig(), objective, count=2)
    assert objective().item() < 1e-12


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (SGDConfig(max_gradient_norm=None), lambda p: torch.optim.SGD(p, 0.01, 0.9, weight_decay=5e-4)),
        (AdamConfig(max_gradient_norm=None), lambda p: torch.optim.Adam(p, 1e-3, weight_decay=5e-4)),
        (AdamWConfig(max_gradient_norm=None), lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.01)),
    ],
)
def test_first_order_methods_are_torchs_own(config, reference):
    ours, theirs = Quadratic([3.0, 1.0]), Quadratic([3.0, 1.0])
    steps(config, ours, count=3)
    optimizer = reference(theirs.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        theirs().backward()
        optimizer.step()
    assert torch.equal(ours.theta, theirs.theta)


def test_adahessian_divides_by_the_diagonal_of_the_hessian():
    """On a diagonal quadratic Hutchinson's estimate is exact, so the first step is lr·g/h = lr·θ."""
    objective = Quadratic([7.0, 2.0, 0.3])
    method, _ = steps(AdaHessianConfig(lr=0.1, weight_decay=0.0), objective)
    torch.testing.assert_close(objective.theta.detach(), torch.full((3,), 0.9, dtype=torch.float64))
    assert method.hessian_products() == 1
    assert objective.theta.grad is None


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 4))


class Regression:
    def __init__(self, model):
        torch.manual_seed(1)
        self.model, self.inputs, self.targets = model, torch.randn(32, 6), torch.randn(32, 4)

    def __call__(self, *, is_differentiated_twice=False):
        return nn.functional.mse_loss(self.model(self.inputs), self.targets)

    def curvature(self, loss):
        return Hessian(loss, list(self.model.parameters()))


def test_muon_steps_hidden_weights_by_an_orthogonal_matrix_and_the_rest_by_adamw():
    model = two_layers()
    before = [p.detach().clone() for p in model.parameters()]
    method = MuonConfig(lr=0.1, weight_decay=0.0, adamw_lr=0.01).build(model, 0)
    method.step(Regression(model), lambda _: None)
    moves = [(p.detach() - old) for p, old in zip(model.parameters(), before, strict=True)]
    singular_values = torch.linalg.svdvals(moves[2])
    # Five Newton-Schulz iterations bring all but the smallest singular values near 1, whatever they were.
    assert 0.05 < singular_values[3] <= singular_values[0] < 0.13
    torch.testing.assert_close(moves[0].abs(), torch.full_like(moves[0], 0.01), rtol=1e-3, atol=1e-4)


def test_soap_lowers_the_loss_and_keeps_an_eigenbasis():
    model = two_layers()
    objective = Regression(model)
    method = SOAPConfig(lr=0.01).build(model, 0)
    first = objective().item()
    for _ in range(40):
        method.step(objective, lambda _: None)
    assert objective().item() < 0.8 * first
    bases = [q for state in method.optimizer.state.values() for q in state.get("Q", []) if len(q)]
    assert bases
    for basis in bases:
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), atol=1e-4, rtol=0)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"cao-optimizer\[baselines\]"):
        SOAPConfig().build(two_layers(), 0)


def test_cao_is_built_with_every_option_of_its_config():
    config = CAOConfig(rank=2, damping=0.3, eigensolver="lanczos", negative_curvature="clip", momentum=0.5)
    optimizer = config.build(two_layers(), 4).optimizer
    assert isinstance(optimizer, CAO)
    group = optimizer.param_groups[0]
    assert (group["rank"], group["damping"], group["eigensolver"], group["seed"]) == (2, 0.3, "lanczos", 4)


def test_the_paper_s_settings_of_the_library_are_those_of_the_laboratory():
    theta = [torch.zeros(3, requires_grad=True)]
    ours, theirs = CAO.paper(theta).defaults, asdict(CAOConfig())
    shared = set(ours) & set(theirs) - {"eigensolver"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"lr", "damping", "power_iterations", "warm_start", "max_update_norm", "weight_decay"} <= shared

import copy
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_models import batch, flat_params, loss_of, ten_steps, train, uneven_network
from torch import Tensor, nn
from torch_versions import takes_named_parameters

from cao import CAO, Eigenpairs

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SETTINGS = {
    "rank": 3, "refresh_every": 4, "damping": 0.5, "momentum": 0.9, "weight_decay": 1e-3, "max_update_norm": 1.0,
}  # fmt: skip
VARIANTS = {
    "warm": {},
    "cold": {"warm_start": False},
    "not kept": {"keep_sketch": False},
    "auto": {"damping": "auto"},
    "lanczos": {"eigensolver": "lanczos"},
    "warm-up": {"warmup_steps": 13},
}
RESUME = """
import sys, torch
from small_models import ten_steps, uneven_network
from cao import CAO

torch.set_num_threads(1)
for path in sys.argv[1:]:
    checkpoint = torch.load(path, weights_only=True)
    model = uneven_network(checkpoint["dtype"])
    optimizer = CAO(model.parameters(), 0.5)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.save(ten_steps(model, optimizer, 10), path + ".end")
"""


def make(dtype: torch.dtype = torch.float64, **settings) -> tuple[nn.Module, CAO]:
    model = uneven_network(dtype)
    return model, CAO(model.parameters(), 0.02, **{**SETTINGS, **settings})


def through_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(model: nn.Module, optimizer: CAO, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, CAO]:
    """Return a fresh pair that was given both states from a file, its own settings being all defaults."""
    other = uneven_network(dtype)
    other.load_state_dict(through_file(model.state_dict()))
    other_optimizer = CAO(other.parameters(), 0.5)
    other_optimizer.load_state_dict(through_file(optimizer.state_dict()))
    return other, other_optimizer


def test_ten_steps_a_fresh_process_and_ten_more_are_the_twenty_bit_for_bit(tmp_path):
    ends = {}
    for name, dtype in DTYPES.items():
        model, optimizer = make(dtype)
        ten_steps(model, optimizer, 0)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dtype": dtype}
        torch.save(states, tmp_path / name)
        ends[name] = ten_steps(model, optimizer, 10)
    paths = [str(tmp_path / name) for name in DTYPES]
    subprocess.run([sys.executable, "-c", RESUME, *paths], check=True, cwd=Path(__file__).parent)
    for name, end in ends.items():
        assert torch.equal(torch.load(tmp_path / f"{name}.end", weights_only=True), end), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_optimizer_goes_on_bit_for_bit(variant, dtype):
    model, optimizer = make(DTYPES[dtype], **VARIANTS[variant])
    ten_steps(model, optimizer, 0)
    other, other_optimizer = resumed(model, optimizer, DTYPES[dtype])
    assert torch.equal(ten_steps(other, other_optimizer, 10), ten_steps(model, optimizer, 10))
    assert other_optimizer.counters == optimizer.counters
    assert other_optimizer.sketch == optimizer.sketch


def test_an_optimizer_saved_before_its_first_step_resumes():
    model, optimizer = make()
    other, other_optimizer = resumed(model, optimizer)
    assert torch.equal(ten_steps(other, other_optimizer, 0), ten_steps(model, optimizer, 0))


def test_an_optimizer_saved_between_refresh_and_step_resumes():
    model, optimizer = make()
    optimizer.refresh_if_due(loss_of(model, batch()))
    other, other_optimizer = resumed(model, optimizer)
    assert not other_optimizer.is_refresh_due
    assert torch.equal(ten_steps(other, other_optimizer, 0), ten_steps(model, optimizer, 0))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("bfloat16", torch.float32), ("float32", torch.float32), ("float64", torch.float64)],
)
def test_vectors_have_their_parameters_shapes_and_keep_their_precision(dtype, kept):
    model, optimizer = make(DTYPES[dtype])
    ten_steps(model, optimizer, 0)
    _, other_optimizer = resumed(model, optimizer, DTYPES[dtype])
    saved = optimizer.state_dict()["state"]
    for index, param in enumerate(model.parameters()):
        assert all(saved[index][f"vector_{i}"].shape == param.shape for i in range(3))
    vectors = other_optimizer.sketch.vectors
    assert vectors.dtype == kept
    assert torch.equal(vectors, optimizer.sketch.vectors)


def test_automatic_damping_is_part_of_the_state():
    model, optimizer = make(damping="auto")
    ten_steps(model, optimizer, 0)
    _, other_optimizer = resumed(model, optimizer)
    zeros = torch.zeros(3, dtype=torch.float64)
    for each in (optimizer, other_optimizer):
        size = sum(p.numel() for p in model.parameters())
        each.refresh(Eigenpairs(zeros, torch.eye(size, 3, dtype=torch.float64), zeros))
    assert other_optimizer.sketch.damping == optimizer.sketch.damping != 1.0


def test_a_warning_given_before_a_save_is_not_given_again():
    model, optimizer = make()
    with pytest.warns(UserWarning, match="discarded"):
        optimizer.refresh(loss_of(model, batch()) * torch.nan)
    other, other_optimizer = resumed(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other_optimizer.refresh(loss_of(other, batch()) * torch.nan)
    assert other_optimizer.counters.failed_refreshes == 2


def test_a_loaded_sketch_is_a_copy():
    model, optimizer = make()
    ten_steps(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    _, other_optimizer = make()
    other_optimizer.load_state_dict(saved)
    for state in saved["state"].values():
        state["vector_0"].zero_()
    assert torch.equal(other_optimizer.sketch.vectors, optimizer.sketch.vectors)


def test_a_state_loaded_twice_starts_from_the_same_place():
    model, optimizer = make()
    start = ten_steps(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends: list[Tensor] = []
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert torch.equal(flat_params(model), start)
        ends.append(ten_steps(model, optimizer, 10))
    assert torch.equal(*ends)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deep_copies_and_pickles_go_on_bit_for_bit(duplicate):
    model, optimizer = make()
    ten_steps(model, optimizer, 0)
    other, other_optimizer = duplicate((model, optimizer))
    assert other_optimizer.param_groups[0]["params"][0] is next(other.parameters())
    expected = ten_steps(model, optimizer, 10)
    assert not torch.equal(flat_params(other), expected)
    assert torch.equal(ten_steps(other, other_optimizer, 10), expected)


def test_groups_keep_their_own_settings_through_a_save():
    ends = []
    for is_resumed in (False, True):
        model = uneven_network()
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2:].parameters(), "momentum": 0.5}]
        optimizer = CAO(groups, 0.03, rank=2, refresh_every=3)
        train(model, optimizer, [batch(seed=seed) for seed in range(5)])
        if is_resumed:
            saved = through_file(optimizer.state_dict())
            optimizer = CAO([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], 9.0, rank=2)
            optimizer.load_state_dict(saved)
        ends.append(ten_steps(model, optimizer, 5))
    assert torch.equal(*ends)


@takes_named_parameters
def test_named_parameters_are_accepted_and_saved():
    model = uneven_network()
    optimizer = CAO(model.named_parameters(), 0.02, **SETTINGS)
    ten_steps(model, optimizer, 0)
    other, other_optimizer = resumed(model, optimizer)
    assert torch.equal(ten_steps(other, other_optimizer, 10), ten_steps(model, optimizer, 10))


def test_a_state_dict_of_version_0_1_loads():
    """Its momentum buffers hold P g with the factor 1/η, which is now applied at the step."""
    param = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    settings = {
        "lr": 0.1, "rank": 1, "refresh_every": 400, "damping": 0.5, "power_iterations": 3, "tolerance": None,
        "warm_start": True, "eigensolver": "subspace", "negative_curvature": "magnitude", "scaling": "inverse-damping",
        "max_update_norm": None, "momentum": 0.9, "weight_decay": 0.0, "decoupled_weight_decay": False,
        "warmup_steps": 0, "maximize": False, "seed": 0,
    }  # fmt: skip
    progress = {
        "steps": 3, "refreshes": 1, "hessian_products": 4, "indefinite_refreshes": 0, "failed_refreshes": 0,
        "singular_directions": 0, "attempts": 1, "attempted_at": 0, "refreshed_at": 0, "values": [4.0],
        "residuals": [0.1], "damping": 0.5, "has_warned": [],
    }  # fmt: skip
    entries = {"momentum_buffer": torch.tensor([2.0, 3.0]).double(), "vector_0": torch.tensor([1.0, 0.0]).double()}
    saved = {"state": {0: entries}, "param_groups": [{**settings, "progress": progress, "params": [0]}]}
    optimizer = CAO([param], 0.5)
    optimizer.load_state_dict(saved)
    assert (optimizer.sketch.values, optimizer.sketch.damping, optimizer.sketch.age) == ([4.0], 0.5, 3)
    assert optimizer.counters.hessian_products == 4
    assert optimizer.param_groups[0]["keep_sketch"]
    param.grad = torch.zeros_like(param)
    optimizer.step()
    # buf ← P̄(β·buf) with buf = η·(2, 3), P̄ = diag(0.5/4.5, 1), and θ ← θ − lr/η·buf.
    expected = torch.tensor([1.0 - 0.1 * 0.9 * 2.0 / 9, 2.0 - 0.1 * 0.9 * 3.0], dtype=torch.float64)
    torch.testing.assert_close(param.detach(), expected)

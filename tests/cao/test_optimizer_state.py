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

from cao import CAO

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SETTINGS = {
    "rank": 3, "refresh_every": 4, "damping": 0.5, "momentum": 0.9, "weight_decay": 1e-3, "max_update_norm": 1.0,
}  # fmt: skip
VARIANTS = {
    "warm": {},
    "cold": {"warm_start": False},
    "auto": {"damping": "auto", "momentum": 0.0},
    "lanczos": {"eigensolver": "lanczos"},
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


@pytest.mark.parametrize("unwraps", [False, True])
def test_a_hook_before_loading_sees_the_sketch_too(unwraps):
    """Parameters are passed in the other order, or the state dict in a box: a hook puts both right."""
    model = uneven_network()
    optimizer = CAO(model.parameters(), 0.02, **SETTINGS)
    ten_steps(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())

    other = copy.deepcopy(model)
    params = list(other.parameters())
    resumed = CAO(params if unwraps else params[::-1], 0.5)

    def put_right(_optimizer, state):
        if unwraps:
            return state["optimizer"]
        last = len(params) - 1
        return {**state, "state": {last - index: entries for index, entries in state["state"].items()}}

    resumed.register_load_state_dict_pre_hook(put_right)
    resumed.load_state_dict({"optimizer": saved} if unwraps else saved)
    for each, own in ((model, optimizer), (other, resumed)):
        train(each, own, [batch()])
    torch.testing.assert_close(flat_params(other), flat_params(model))


def test_hooks_after_saving_and_loading_find_the_sketch():
    model, optimizer = make()
    ten_steps(model, optimizer, 0)
    optimizer.register_state_dict_post_hook(lambda _, state: {"optimizer": state})
    saved = through_file(optimizer.state_dict())["optimizer"]

    _, resumed = make()
    found = []
    resumed.register_load_state_dict_post_hook(lambda each: found.append(each.sketch.values))
    resumed.load_state_dict(saved)
    assert found == [optimizer.sketch.values]


def test_a_state_that_lacks_one_vector_of_one_parameter_is_refused():
    model, optimizer = make()
    ten_steps(model, optimizer, 0)
    saved = through_file(optimizer.state_dict())
    del saved["state"][1]["vector_1"]
    _, fresh = make()
    with pytest.raises(ValueError, match="but not all of its vectors"):
        fresh.load_state_dict(saved)
    assert fresh.sketch is None

"""Threads that train or draw while another one refreshes, made to overlap by events rather than by luck."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from types import ModuleType

import pytest
import torch
from small_models import batch, loss_of, smooth_network
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cao import CAO
from cao.autograd.derivatives import outside_fabric
from cao.autograd.isolation import isolated_forward
from cao.linalg.columns import full_precision
from cao.threads import before_forward_passes

CPU = torch.device("cpu")


@contextmanager
def elsewhere(context: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Hold a context in a thread of its own, entered before the block begins and left after it ends."""
    is_in, may_leave = Event(), Event()

    def hold() -> None:
        with context():
            is_in.set()
            assert may_leave.wait(30)

    thread = Thread(target=hold)
    thread.start()
    try:
        assert is_in.wait(30)
        yield
    finally:
        may_leave.set()
        thread.join()


def in_a_thread(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


def overlap(context: Callable[[], AbstractContextManager]) -> None:
    """Enter a context in two threads, and leave it first where it was entered first."""
    second = elsewhere(context)
    with elsewhere(context):
        second.__enter__()
    second.__exit__(None, None, None)


def test_another_thread_keeps_its_batch_norm_updates_while_one_refreshes():
    ours, theirs = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    with isolated_forward(CPU):
        ours(torch.randn(5, 4))
        in_a_thread(lambda: theirs(torch.randn(5, 4)))
    assert ours.num_batches_tracked == 0
    assert theirs.num_batches_tracked == 1


def test_a_model_trained_beside_a_whole_refresh_counts_every_batch():
    model, theirs = smooth_network(), nn.BatchNorm1d(3).double()
    optimizer = CAO(model.parameters(), 0.1, rank=2, power_iterations=2)
    passes = []

    def loss() -> torch.Tensor:
        in_a_thread(lambda: passes.append(theirs(batch()[0])))
        return loss_of(model, batch())

    assert optimizer.refresh(loss)
    assert theirs.num_batches_tracked == len(passes) > 1


def flags() -> dict[str, object]:
    """Return what torch has one of for all threads."""
    return {
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }


def test_flags_come_back_when_refreshes_overlap():
    before = flags()
    overlap(lambda: isolated_forward(CPU))
    assert flags() == before
    assert before["fast path"]


def test_flags_stay_until_the_last_refresh_has_ended():
    with isolated_forward(CPU):
        with elsewhere(lambda: isolated_forward(CPU)):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_kernels_that_a_user_chose_come_back():
    with sdpa_kernel(SDPBackend.MATH):
        before = flags()
        overlap(lambda: isolated_forward(CPU))
        assert flags() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_the_precision_of_products_comes_back_when_two_threads_do_linear_algebra():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        overlap(full_precision)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_the_flag_of_fabric_comes_back_when_two_threads_differentiate(monkeypatch):
    wrappers = ModuleType("lightning.fabric.wrappers")
    wrappers._in_fabric_backward = False
    monkeypatch.setitem(sys.modules, "lightning.fabric.wrappers", wrappers)
    overlap(outside_fabric)
    assert wrappers._in_fabric_backward is False


def test_compiled_models_are_compiled_again_when_overlapping_refreshes_have_ended():
    dynamo = pytest.importorskip("torch._dynamo.eval_frame")
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("torch before 2.6 cannot run a compiled model uncompiled")
    overlap(lambda: isolated_forward(CPU))
    assert dynamo._stance.stance == "default"


class Deep(torch.autograd.Function):
    """Runs a backward pass within its backward pass: beyond 60 of them autograd uses threads of its own."""

    @staticmethod
    def forward(ctx, inputs, module, levels):
        ctx.module, ctx.levels = module, levels
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            deeper = Deep.apply(inner, ctx.module, ctx.levels - 1) if ctx.levels else ctx.module(inner)
            deeper.sum().backward()
        return gradient, None, None


def test_what_autograd_runs_in_threads_of_its_own_is_met_too():
    met, layer = [], nn.Linear(1, 1)
    output = Deep.apply(torch.ones(1, requires_grad=True), layer, 70)
    with before_forward_passes(met.append):
        output.sum().backward()
    assert met == [layer]


def test_a_replica_is_looked_for_once(monkeypatch, tmp_path):
    """A search among all objects at every look was most of the look's price."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(smooth_network())
        optimizer = CAO(model.parameters(), 0.1, rank=1, refresh_every=1)
        searches, search = [], gc.get_objects
        monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or search())
        for _ in range(3):
            assert optimizer.refresh(loss_of(model, batch()))
        assert len(searches) == 1
    finally:
        torch.distributed.destroy_process_group()

"""What only a GPU can tell: `pytest -m cuda` runs these, and where there is none the test run lists them as skipped."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_ranks import run_rank
from small_models import batch, flat_params, loss_of, noisy_network, smooth_network
from torch import Tensor, multiprocessing, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD
from two_ranks import SETTINGS, WORLD, train_from

from cao import CAO, GaussNewton, Lanczos, LeastSquares, Sharpness, SketchedLBFGS
from cao_lab.cli import main
from cao_lab.runs import session

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")]
DEVICE = "cuda"
FORMS: dict[str, dict[str, Any]] = {
    "default rules": {"momentum": 0.9},
    "the paper": {**SETTINGS, "max_update_norm": 0.1, "negative_curvature": "signed", "momentum": 0.0},
    "lanczos": {**SETTINGS, "eigensolver": Lanczos(5)},
}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Let torch raise an error where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def moved(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0].to(DEVICE), data[1].to(DEVICE)


def step(model: nn.Module, optimizer: CAO, data: tuple[Tensor, Tensor]) -> None:
    train_from("loss", model, optimizer, [data])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["loss", "parts", "gauss-newton"])
def test_what_is_found_on_a_gpu_lowers_the_loss_as_on_the_processor(form: str, kind: str) -> None:
    """Random starts differ between devices, so that steps agree only as far as eigenpairs have converged."""
    losses = []
    for put in (lambda data: data, moved):
        model = smooth_network()
        data = put(batch(16))
        model.to(data[0].device)
        train_from(kind, model, CAO(model.parameters(), 0.1, **FORMS[form]), [data] * 12)
        losses.append(loss_of(model, data).item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"max_update_norm": 0.1}, {"momentum": 0.9, "nesterov": True}])
def test_a_step_between_refreshes_never_waits_for_the_gpu(settings: dict[str, Any]) -> None:
    model, data = smooth_network().to(DEVICE), moved(batch(16))
    optimizer = CAO(model.parameters(), 0.1, rank=2, refresh_every=10, damping=0.5, **settings)
    step(model, optimizer, data)  # The first one compares its gradient with that of the refresh.
    with without_waiting():
        for _ in range(3):
            step(model, optimizer, data)


def test_a_step_can_be_captured_in_a_graph() -> None:
    model, data = smooth_network().to(DEVICE), moved(batch(16))
    optimizer = CAO(model.parameters(), 0.1, rank=2, refresh_every=100, damping=0.5, momentum=0.9)
    step(model, optimizer, data)
    step(model, optimizer, data)
    other = copy.deepcopy((model, optimizer))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    other[1].step()
    torch.testing.assert_close(flat_params(model), flat_params(other[0]))


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, data = noisy_network().to(DEVICE), moved(batch(16))
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    for _ in range(5):
        step(model, optimizer, data)
    again = copy.deepcopy(model)
    resumed = CAO(again.parameters(), 0.1, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((model, optimizer), (again, resumed)):
        torch.manual_seed(0)
        for _ in range(4):
            step(each, its_optimizer, data)
    assert torch.equal(flat_params(model), flat_params(again))


def test_an_epoch_by_the_command_and_one_more_after_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    command = ["train", "cao", "--epochs", "2", "--width", "8", "--device", DEVICE]
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(command)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    (log,) = tmp_path.glob("logs/**/epochs.csv")
    assert len(log.read_text().splitlines()) == 3


def peak_of(action: Callable[[], object]) -> int:
    """Return the bytes that an action takes beside what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_gauss_newton_refresh_takes_the_memory_of_a_training_step() -> None:
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers).to(DEVICE)
    inputs = torch.randn(50_000, 64, device=DEVICE)
    optimizer = CAO(model.parameters(), 1e-3, rank=1, refresh_every=1, damping=0.1, power_iterations=1)
    source = GaussNewton(model, inputs, lambda outputs: outputs.square().mean())

    def gradient() -> None:
        model(inputs).square().mean().backward()

    optimizer.refresh(source)
    gradient()
    assert peak_of(lambda: optimizer.refresh(source)) <= 1.1 * peak_of(gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_curvature_under_autocast_and_a_scaler_is_that_of_the_plain_loss(dtype: torch.dtype) -> None:
    model, (inputs, labels) = smooth_network(torch.float32).to(DEVICE), moved(batch(64, dtype=torch.float32))
    plain, mixed = (CAO(model.parameters(), 0.1, **{**SETTINGS, "power_iterations": 10}) for _ in range(2))
    plain.refresh(cross_entropy(model(inputs), labels))
    scaler = torch.amp.GradScaler(DEVICE)
    with torch.autocast(DEVICE, dtype):
        loss = cross_entropy(model(inputs), labels)
    scaled = scaler.scale(loss)
    mixed.refresh(scaled, scale=scaler.get_scale())
    scaled.backward()
    scaler.step(mixed)
    scaler.update()
    assert mixed.counters.steps == 1
    assert mixed.sketch is not None
    assert plain.sketch is not None
    assert mixed.sketch.values == pytest.approx(plain.sketch.values, rel=0.1)


@pytest.mark.parametrize("kind", ["Jacobian", "products"])
def test_sketched_lbfgs_fits_on_a_gpu(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)).double().to(DEVICE)
    inputs = torch.randn(50, 2, dtype=torch.float64, device=DEVICE)
    targets = (inputs[:, :1] * inputs[:, 1:]).sin()
    size = 1 << 25 if kind == "Jacobian" else 1
    source = LeastSquares(lambda: (model(inputs) - targets) / 50**0.5, model.parameters(), max_jacobian_size=size)
    optimizer = SketchedLBFGS(model.parameters(), source=source, max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    assert optimizer.status.derivative.startswith(kind)
    assert float(closure()) < 1e-2 * first


def test_a_watch_keeps_to_its_budget_by_the_time_of_the_gpu() -> None:
    model, data = smooth_network().to(DEVICE), moved(batch(16))
    optimizer = SGD(model.parameters(), 0.1)
    watch = Sharpness(optimizer, budget=0.5)
    for _ in range(2_000):
        loss = loss_of(model, data)
        optimizer.zero_grad()
        watch(loss)
        loss.backward()
        optimizer.step()
    assert 1 < len(watch.readings) < 1_000
    assert watch.readings[-1].sharpness > 0


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"NCCL needs {WORLD} GPUs")
def test_two_gpus_take_the_same_steps_over_nccl(tmp_path: Path) -> None:
    multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=WORLD)
    ends = [torch.load(tmp_path / f"rank{rank}") for rank in range(WORLD)]
    assert torch.equal(*ends)
    alone = smooth_network().to(DEVICE)
    optimizer = CAO(alone.parameters(), 0.1, **SETTINGS)
    train_from("loss", alone, optimizer, [moved(batch(16, seed=seed)) for seed in range(8)])
    torch.testing.assert_close(ends[0], flat_params(alone).cpu(), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_the_quick_benchmark_runs_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--quick", "--device", DEVICE, "--out", str(tmp_path)])
    assert not ended.value.code
    rows = {row["name"]: row for row in json.loads((tmp_path / "bench.json").read_text())}
    assert rows["memory_over_sgd_gauss_newton"]["value"] > 0

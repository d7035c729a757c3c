import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_example(name: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_quadratic_needs_a_hundredth_of_the_steps_of_gradient_descent(tmp_path):
    lines = run_example("quadratic", folder=tmp_path).splitlines()
    sgd, cao = (int(line.split()[1]) for line in lines)
    assert cao * 100 < sgd


@pytest.mark.slow
def test_the_training_loop_goes_on_from_its_checkpoint(tmp_path):
    first = run_example("training_loop", "--epochs", "2", folder=tmp_path)
    second = run_example("training_loop", "--epochs", "3", folder=tmp_path)
    epochs = [line.split(":")[0] for line in (first + second).splitlines() if line.startswith("epoch")]
    assert epochs == ["epoch 1", "epoch 2", "epoch 3"]
    assert "CAO after 45 steps" in second  # Three epochs of ⌈1797/128⌉ steps.


def test_the_curvature_of_a_model_is_printed_with_its_residuals(tmp_path):
    hessian, gauss_newton = run_example("model_curvature", folder=tmp_path).splitlines()
    assert hessian.startswith("Hessian: ")
    values = [float(value) for value in gauss_newton.split(": ")[1].split(" (")[0].split(", ")]
    assert values == sorted(values, reverse=True)
    assert min(values) > 0


@pytest.mark.slow
def test_the_edge_of_stability_is_drawn_and_told(tmp_path):
    lines = run_example("sharpness", "--epochs", "5", folder=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["SGD", "Adam", "CAO"]
    assert (tmp_path / "out/sharpness.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_largest_safe_rate_is_found_and_half_of_it_trains_best(tmp_path):
    edge, *losses, written = run_example("largest_safe_rate", folder=tmp_path).splitlines()
    slow, safe, wild = (float(line.split("loss ")[1]) for line in losses)
    assert "of the edge" in edge
    assert safe < slow < wild
    assert written == "wrote out/largest_safe_rate.png"


@pytest.mark.slow
def test_a_physics_informed_network_is_solved_by_three_and_drawn(tmp_path):
    options = ("--seconds", "0.3", "--adam", "20", "--width", "6", "--points", "60")
    *solved, written = run_example("pinn", *options, folder=tmp_path).splitlines()
    losses = {line.split(":")[0]: float(line.split("loss ")[1].split(",")[0]) for line in solved}
    assert set(losses) == {"L-BFGS", "SSBroyden", "SketchedLBFGS"}
    assert all(0 < loss < 1e4 for loss in losses.values())
    assert written == "written to out/pinn.png"
    assert (tmp_path / "out/pinn.png").read_bytes().startswith(b"\x89PNG")


def test_a_sharded_model_is_trained(tmp_path):
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in run_example("fsdp", folder=tmp_path).splitlines()]
    assert losses[-1] < losses[0] / 100


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_every_example_says_how_to_run_it(name):
    assert f"python examples/{name}.py" in (ROOT / "examples" / f"{name}.py").read_text()

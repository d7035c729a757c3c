import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "scipy", "pandas", "matplotlib", "sklearn", "tyro", "tqdm", "plotly", "cao_lab")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_imports_and_steps_with_torch_and_jaxtyping_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = f"""
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import torch, cao
assert cao.__file__.startswith({str(tmp_path)!r}), cao.__file__
weight = torch.nn.Parameter(torch.ones(3))
optimizer = cao.CAO([weight], lr=0.1)
loss = weight.square().sum()
optimizer.refresh_if_due(loss)
loss.backward()
optimizer.step()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env={"PYTHONPATH": str(tmp_path)})


def test_the_wheel_is_typed_and_carries_its_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"cao/py.typed", "cao_lab/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_library_requires_torch_and_jaxtyping_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [requirement.split(">=")[0] for requirement in project["dependencies"]] == ["torch", "jaxtyping"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()

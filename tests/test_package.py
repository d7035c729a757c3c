import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def requirements_of(name: str, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the distribution and, transitively, all it requires here."""
    if name in known:
        return known
    known |= {name}
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            known = requirements_of(requirement.name, known)
    return known


def link_distribution(name: str, folder: Path) -> None:
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def installed_alone(wheel, tmp_path_factory) -> Path:
    """Return a folder of packages that holds the wheel, torch, jaxtyping and what these need."""
    folder = tmp_path_factory.mktemp("installed")
    for name in requirements_of("torch") | requirements_of("jaxtyping"):
        link_distribution(name, folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_imports_and_steps_with_torch_and_jaxtyping_alone(installed_alone):
    program = """
import torch, cao
weight = torch.nn.Parameter(torch.ones(3))
optimizer = cao.CAO([weight], lr=0.1)
loss = weight.square().sum()
optimizer.refresh_if_due(loss)
loss.backward()
optimizer.step()
print(cao.__file__)
"""
    command = [sys.executable, "-S", "-W", "ignore", "-c", program]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(installed_alone)}
    )
    assert output.stdout.startswith(str(installed_alone))


def test_the_command_without_the_laboratory_names_the_extra_in_one_line(installed_alone):
    entry = (next(installed_alone.glob("cao_optimizer-*.dist-info")) / "entry_points.txt").read_text()
    module, function = re.search(r"^cao = (\S+):(\S+)$", entry, re.MULTILINE).groups()
    program = f"from {module} import {function}; {function}()"
    environment = {"PYTHONPATH": str(installed_alone)}
    command = [sys.executable, "-S", "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert re.fullmatch(r"cao: \w+ is not installed; .* pip install 'cao-optimizer\[lab\]'\n", ended.stderr)


def test_the_wheel_is_typed_and_carries_its_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"cao/py.typed", "cao_lab/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_library_requires_torch_and_jaxtyping_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [requirement.split(">=")[0] for requirement in project["dependencies"]] == ["torch", "jaxtyping"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()

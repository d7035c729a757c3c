import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def built(folder: Path, kind: str) -> Path:
    """Return the wheel or the source distribution."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(path for path in folder.iterdir() if path.name.startswith("cao_optimizer-"))


def requirements_in(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"), "wheel")


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
        # Some share a folder, such as that of typing stubs.
        if not (folder / top).exists():
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
print(cao.__file__, cao.__version__)
"""
    command = [sys.executable, "-S", "-W", "ignore", "-c", program]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(installed_alone)}
    )
    file, version = output.stdout.split()
    assert file.startswith(str(installed_alone))
    assert version == LIBRARY["version"]


def test_importing_the_library_imports_no_loop_of_others(installed_alone):
    program = "import sys, cao, cao.integrations.watching, cao.integrations.tensorboard; print(*sys.modules)"
    environment = {"PYTHONPATH": str(installed_alone)}
    command = [sys.executable, "-S", "-W", "ignore", "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    assert not {"lightning", "transformers", "accelerate", "deepxde", "tensorboard"} & set(output)


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


def test_the_wheel_is_typed_carries_its_licence_and_all_of_both_packages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for one in ("cao", "cao_lab") for path in (ROOT / "src" / one).rglob("*")]
    files = {path.relative_to(ROOT / "src").as_posix() for path in sources if path.is_file()}
    kept = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if "dist-info" not in name} == kept | {"cao_command.py"}
    assert {"cao/py.typed", "cao_lab/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_no_requirement_of_the_wheel_names_a_place(wheel):
    assert [str(one) for one in requirements_in(wheel) if one.url] == []


def test_changelog_and_citation_have_the_version():
    assert f"## {LIBRARY['version']} " in (ROOT / "CHANGELOG.md").read_text().split("\n\n")[1]
    assert f"\nversion: {LIBRARY['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_extra_lab_installs_the_laboratory_as_from_an_index_and_its_command_works(kind, tmp_path):
    """A new environment in which everything else is there already, so that no network is needed."""
    found = built(tmp_path / "index", kind)
    venv.create(tmp_path / "env", symlinks=True)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    needed = [Requirement(line).name for line in LIBRARY["optional-dependencies"]["lab"]]
    for name in frozenset().union(*(requirements_of(name) for name in ["torch", "jaxtyping", "hatchling", *needed])):
        link_distribution(name, site)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env/bin/python")]
    # Named as one names it from an index; the folder of the archive is gone when the command runs.
    index = ["--no-index", "--find-links", str(found.parent), "--no-build-isolation"]
    subprocess.run([*pip, "install", "--quiet", *index, "cao-optimizer[lab]"], check=True, env=environment)
    found.unlink()
    help_ = subprocess.run(
        [tmp_path / "env/bin/cao", "--help"], check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert "usage: cao" in help_.stdout
    assert (site / "cao_lab/reporting/page.html").exists()


def test_the_library_requires_torch_and_jaxtyping_and_nothing_else():
    assert [requirement.split(">=")[0] for requirement in LIBRARY["dependencies"]] == ["torch", "jaxtyping"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()

"""The test runner itself: a test that kills its process, or hangs in native code, fails the run and is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FINE = """
import pytest, time

@pytest.mark.parametrize("number", range(3))
def test_fine(number):
    time.sleep(0.1)
"""

CRASHING = """
import os

def test_that_crashes():
    os.abort()
"""

# The lock of the interpreter is never given back, and no signal gets through.
HANGING = """
import ctypes, signal

def test_that_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(1000)
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param("crashes", CRASHING, id="crash"), pytest.param("hangs", HANGING, id="hang", marks=pytest.mark.slow)],
)
def test_a_run_with_a_test_that_ends_badly_fails_in_time_and_names_it(tmp_path, name, text):
    for file, content in {"test_bad": text, **{f"test_fine_{number}": FINE for number in range(4)}}.items():
        (tmp_path / f"{file}.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    command += ["-p", "time_limit", "-o", "time_limit=10", "-o", "filterwarnings=", "."]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT / "tests")}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 1
    assert f"crashed while running 'test_bad.py::test_that_{name}'" in ended.stdout

"""Check the shapes and types of the library's inner modules at run time; its border must answer bad input itself."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import install_import_hook

MODULES = [f"cao.{name}" for name in ("linalg", "eigensolvers", "preconditioner", "step", "spectrum")]

with install_import_hook(MODULES, "beartype.beartype"):
    import cao  # noqa: F401

pytest_plugins = ["time_limit"]

# One thread unless told otherwise: sums repeat, and two test workers share two cores.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def same_import_path() -> Iterator[None]:
    """Put the path back that a test's own file was imported from: processes that later tests spawn inherit it."""
    before = list(sys.path)
    yield
    sys.path[:] = before

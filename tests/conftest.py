"""Check the shapes and types of the library's inner modules at run time; its border must answer bad input itself."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Not all of cao.linalg: beartype draws from Python's random stream where it checks a list.
NUMERICAL = (
    "linalg.columns",
    "linalg.eigensolvers",
    "linalg.spectrum",
    "sketch.damped",
)
MODULES = [f"cao.{name}" for name in NUMERICAL]

with install_import_hook(MODULES, "beartype.beartype"):
    import cao  # noqa: F401

pytest_plugins = ["time_limit"]

# No timing decides a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# One thread unless told otherwise: sums repeat, and two test workers share two cores.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Put back what a test may leave to later ones: the import path, which spawned processes inherit, and threads.

    Accelerate remembers in the process which data loader is being read: one left half-way ends all accumulation.
    """
    path, threads = list(sys.path), torch.get_num_threads()
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.GradientState._reset_state()
    yield
    sys.path[:] = path
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

"""Check the shapes and types of the library's inner modules at run time; its border must answer bad input itself."""

import os

import torch
from jaxtyping import install_import_hook

MODULES = [f"cao.{name}" for name in ("linalg", "eigensolvers", "preconditioner", "step", "spectrum")]

with install_import_hook(MODULES, "beartype.beartype"):
    import cao  # noqa: F401

pytest_plugins = ["time_limit"]

# One thread unless told otherwise: sums repeat, and two test workers share two cores.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

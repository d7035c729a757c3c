"""Shapes and types of the library's signatures are checked at run time, and one thread makes timings and sums repeat."""

from jaxtyping import install_import_hook

with install_import_hook("cao", "beartype.beartype"):
    import cao  # noqa: F401

import torch

torch.set_num_threads(1)

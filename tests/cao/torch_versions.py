"""What older versions of torch cannot do: marks by which tests are skipped there."""

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

runs_compiled_models_eagerly = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 cannot run a compiled model uncompiled"
)
takes_named_parameters = pytest.mark.skipif(VERSION < (2, 6), reason="torch before 2.6 takes no named parameters")
has_fully_shard = pytest.mark.skipif(VERSION < (2, 6), reason="torch before 2.6 keeps fully_shard to itself")
has_mkldnn_precision = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has one precision for products on a CPU"
)

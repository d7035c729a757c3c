"""Run a model again as if nobody had: its parameters, its buffers and all random streams come out as they went in."""

import gc
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from cao.autograd.gathering import gathered_parameters
from cao.threads import before_forward_passes, process_wide

REPLICAS = WeakIdKeyDictionary()
"""By the first of its parameters, what `replicas_of` has found for an optimizer: how many, and which."""


@contextmanager
def isolated_forward(device: torch.device) -> Iterator[None]:
    """Let forward passes inside change no buffer or parameter and move no random stream.

    Each use starts from the same random state, so that dropout masks repeat. Attention runs on the kernel that has
    higher and forward-mode derivatives, and compiled models run uncompiled, for the same reason.
    """
    with ExitStack() as stack:
        stack.enter_context(same_random_streams(device))
        stack.enter_context(cloned_buffers())
        stack.enter_context(twice_differentiable())
        stack.enter_context(replicas_met_as_plain_models())
        stack.enter_context(gathered_parameters())
        stack.enter_context(torch.enable_grad())
        yield


@process_wide
@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Let models run on kernels that have second and forward derivatives, uncompiled, in all threads."""
    with sdpa_kernel(SDPBackend.MATH), without_fast_path(), uncompiled():
        yield


@contextmanager
def replicas_met_as_plain_models() -> Iterator[None]:
    """Let DistributedDataParallel run as the model inside it wherever it is called."""
    with ExitStack() as stack:

        def meet(root: nn.Module) -> None:
            if isinstance(root, DistributedDataParallel):
                stack.enter_context(as_plain_models([root]))

        stack.enter_context(before_forward_passes(meet))
        yield


@contextmanager
def as_plain_models(replicas: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Let replicas run, and their graphs be differentiated, without collectives and without preparing for any.

    The first derivative of a static graph would otherwise pass for its first backward pass, find that no parameter has
    a gradient yet, and leave all of them out of every later reduction. The flags are those that `no_sync` sets, and the
    one by which DistributedDataParallel remembers that pass.
    """
    with ExitStack() as stack:
        for replica in replicas:
            flags = {"require_backward_grad_sync": False, "require_forward_param_sync": False}
            if replica.static_graph:
                flags["_static_graph_delay_allreduce_enqueued"] = True
            stack.callback(vars(replica).update, {name: vars(replica)[name] for name in flags})
            vars(replica).update(flags)
        yield


def check_not_joining(params: Sequence[Tensor]) -> None:
    """Refuse a refresh within `DistributedDataParallel.join()`, where a process without data takes no part in it.

    Its shadow collectives would be taken for ours.
    """
    if any(replica._join_config.enable for replica in replicas_of(params)):
        raise RuntimeError(
            "a refresh within DistributedDataParallel.join() is not supported, because a process that has run out "
            "of data takes no part in it; make the processes' data even, for example by drop_last=True"
        )


def replicas_of(params: Sequence[Tensor]) -> WeakSet[DistributedDataParallel]:
    """Return the DistributedDataParallel models of these parameters.

    The optimizer does not know the model, so they are looked for among all objects, which takes a fraction of a second,
    and then remembered for as long as one of them lives; if there are none, that is.
    """
    replicas: WeakSet[DistributedDataParallel]
    count, replicas = REPLICAS.get(params[0], (1, WeakSet()))
    if count and not replicas:
        known = set(map(id, params))
        found = [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
        replicas = WeakSet(replica for replica in found if not known.isdisjoint(map(id, replica.parameters())))
        REPLICAS[params[0]] = len(replicas), replicas
    return replicas


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let transformer layers in evaluation mode run step by step: their fused path has no forward derivative."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let torch.compile's models run eagerly, if there can be one, and torch (2.6 and later) can be told to."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    is_told = hasattr(torch.compiler, "set_stance")
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager") if is_told else nullcontext():
        # The hook of cloned_buffers is harmless there: a module that was met already is passed over.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        yield


@contextmanager
def same_random_streams(device: torch.device) -> Iterator[None]:
    """Put the streams of torch, Python and numpy (if it is loaded) back where they were."""
    python_state = random.getstate()
    numpy_random: Any = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)


@contextmanager
def cloned_buffers() -> Iterator[None]:
    """Give every module that is called inside clones of its buffers, and put the originals back.

    The optimizer does not know the model, so modules are met by a hook. The original tensors are not written to at all:
    copying their values back would break the backward pass of a graph that saved them. For the same reason embeddings
    leave their rows at whatever norm they have.
    """
    originals: dict[nn.Module, dict[str, Tensor | None]] = {}
    limits: dict[nn.Embedding | nn.EmbeddingBag, float] = {}
    clones: dict[Tensor, Tensor] = {}  # Modules may share a buffer, and then share its clone.

    def swap(root: nn.Module) -> None:
        if root in originals:
            return
        for module in root.modules():
            if module not in originals:
                originals[module] = dict(module._buffers)
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                    limits[module], module.max_norm = module.max_norm, None
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        if buffer not in clones:
                            clones[buffer] = buffer.clone()
                        module._buffers[name] = clones[buffer]

    try:
        with before_forward_passes(swap):
            yield
    finally:
        for embedding, limit in limits.items():
            embedding.max_norm = limit
        for module, buffers in originals.items():
            # One by one, because the buffers of a TorchScript module know no other way.
            for name, buffer in buffers.items():
                module._buffers[name] = buffer


@contextmanager
def replaced_parameters(model: nn.Module, replacements: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let the model run on other tensors in place of some of its parameters, which then come back.

    `torch.func.functional_call` would do, but it loses the parameter of a module that is registered twice.
    """
    originals = {module: dict(module._parameters) for module in model.modules()}
    try:
        for module, parameters in originals.items():
            for name, parameter in parameters.items():
                if parameter is not None and parameter in replacements:
                    # A plain tensor may stand in a parameter's place; the annotation does not say so.
                    module._parameters[name] = replacements[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, parameters in originals.items():
            module._parameters.update(parameters)

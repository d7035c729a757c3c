"""Derivatives of graphs, first and second, with errors that name a way out."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from cao.threads import process_wide

Gradient: TypeAlias = Sequence[Tensor | None]


class NoSecondDerivativeError(RuntimeError):
    """A graph that can be differentiated once, but not twice."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"this graph has no second derivative ({reason}). Ways out: use GaussNewton, which needs none; for "
            "attention, pass a function that runs the uncompiled model, or run the model under "
            'torch.nn.attention.sdpa_kernel(SDPBackend.MATH) (transformers: attn_implementation="eager"); use '
            "torch.utils.checkpoint with use_reentrant=False; run an LSTM without cuDNN"
        )


class Graph:
    """The nodes behind some outputs, walked through once, when they are first asked for."""

    def __init__(self, outputs: Gradient) -> None:
        self.roots = [output.grad_fn for output in outputs if output is not None and output.grad_fn is not None]

    @cached_property
    def parents(self) -> dict[Node, list[Node]]:
        """Every node of the graph with the nodes that lead to it."""
        parents: dict[Node, list[Node]] = {root: [] for root in self.roots}
        pending = list(parents)
        while pending:
            node = pending.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in parents:
                    parents[following] = []
                    pending.append(following)
                parents[following].append(node)
        return parents

    def named(self, name: str) -> list[Any]:
        """Return the nodes of this name."""
        return [node for node in self.parents if node.name() == name]

    @property
    def has_reentrant_checkpoint(self) -> bool:
        """Whether a reentrant checkpoint stands anywhere in the graph."""
        return bool(self.named("CheckpointFunctionBackward"))


def gradient_graph(loss: Tensor, params: Sequence[Tensor], graph: Graph | None = None) -> Gradient:
    """Return the gradient as a graph that can be differentiated again; None for parameters the loss does not use."""
    graph = graph or Graph([loss])
    check_second_derivatives(graph, params)
    gradient = derivative([loss], params, [torch.ones_like(loss)], create_graph=True, graph=graph)
    if all(part is None for part in gradient):
        raise ValueError(
            "the loss depends on none of the parameters; build the optimizer from the very model that is trained, "
            "not from one it was copied from, and not before fully_shard and the like have replaced its parameters. If "
            "they are sharded by fully_shard, pass a function that returns the loss: the graph of a loss that is "
            "already computed does not lead to them"
        )
    return gradient


def derivative(
    outputs: Gradient,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    create_graph: bool = False,
    keep_graph: bool = True,
    graph: Graph | None = None,
) -> list[Tensor | None]:
    """Differentiate the outputs, summed with weights; None where nothing depends on an input.

    A graph that is not kept gives its memory back on the way, as in an ordinary backward pass.

    Outputs that are None or constant, such as the gradient of a linear loss, count as zero. Autocast is off, as for any
    backward pass.
    """
    live = [(o, w) for o, w in zip(outputs, weights, strict=True) if o is not None and o.requires_grad]
    if not live:
        return [None] * len(inputs)
    graph = graph or Graph([output for output, _ in live])
    try:
        with (
            outside_fabric(),
            torch.autocast(inputs[0].device.type, enabled=False),
            differentiable_placements(graph)
            if create_graph and "torch.distributed.tensor" in sys.modules
            else nullcontext(),
        ):
            results = torch.autograd.grad(
                [output for output, _ in live],
                inputs,
                [weight for _, weight in live],
                retain_graph=keep_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
    except RuntimeError as error:
        if (explained := with_way_out(error)) is None:
            raise
        raise explained from error
    # torch refuses a reentrant checkpoint only where it stands between the outputs and an input; the parameters inside
    # it would look unused.
    if create_graph and any(result is None for result in results) and graph.has_reentrant_checkpoint:
        raise NoSecondDerivativeError("a reentrant checkpoint is incompatible with .grad()")
    return list(results)


def with_way_out(error: RuntimeError) -> RuntimeError | None:
    """Return torch's complaint about a missing second derivative as one that names the way out; None for any other."""
    if "a second time" in str(error):
        return RuntimeError(
            "the graph of this loss is gone; refresh before loss.backward(), not after it, and let a function run its "
            "forward pass anew at every call (or pass the loss itself)"
        )
    symptoms = (
        "is not implemented", "double backward", "incompatible with .grad()", "once_differentiable", "donated buffers",
    )  # fmt: skip
    if not any(symptom in str(error) for symptom in symptoms):
        return None
    return NoSecondDerivativeError(str(error).splitlines()[0])


@contextmanager
def differentiable_placements(graph: Graph) -> Iterator[None]:
    """Let gradients of tensor-parallel models be differentiated where activations become DTensors.

    torch 2.13 moves the gradient of such an activation to its place without a graph: the second derivative would be
    silently wrong. Moved there beforehand, by an operation that has a graph, it is left as it is.
    """
    with ExitStack() as stack:
        for node in graph.named("_FromTorchTensorBackward"):
            stack.callback(node.register_prehook(partial(place_gradient, node)).remove)
        yield


def place_gradient(node: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradient of an activation, placed as the activation is, or replicated where that is a sum."""
    (gradient,) = gradients
    if gradient is None:
        return gradients
    wanted = node.grad_placements or node.forward_input_placements
    replicated = sys.modules["torch.distributed.tensor"].Replicate()
    return (gradient.redistribute(placements=[replicated if each.is_partial() else each for each in wanted]),)


def check_second_derivatives(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse a graph in which a node between output and inputs is known to lose its second derivative in silence."""
    pending = [get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in graph.parents or node in seen:
            continue
        seen.add(node)
        pending.extend(graph.parents[node])
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        # torch hangs an error behind such a backward pass, but never runs into it on the way to the parameters.
        if getattr(getattr(backward, "__code__", None), "co_qualname", "").startswith("once_differentiable."):
            raise NoSecondDerivativeError(f"{node.name()} is marked @once_differentiable")
        if node.name().startswith("WeightNormInterfaceBackward"):
            raise NoSecondDerivativeError("torch's own of weight_norm takes the norm for a constant")


@process_wide
@contextmanager
def outside_fabric() -> Iterator[None]:
    """Let the graphs of Fabric's models be differentiated outside `fabric.backward`, on which it may insist."""
    names = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
    modules = [vars(sys.modules[name]) for name in names if name in sys.modules]
    flags = [(module, module["_in_fabric_backward"]) for module in modules if "_in_fabric_backward" in module]
    try:
        for module, _ in flags:
            module["_in_fabric_backward"] = True
        yield
    finally:
        for module, flag in flags:
            module["_in_fabric_backward"] = flag

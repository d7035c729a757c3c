"""Derivatives of graphs, first and second, with errors that name a way out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

Gradient: TypeAlias = Sequence[Tensor | None]


def gradient_graph(loss: Tensor, params: Sequence[Tensor]) -> Gradient:
    """Return the gradient as a graph that can be differentiated again; None for parameters the loss does not use."""
    return derivative([loss], params, [torch.ones_like(loss)], create_graph=True)


def derivative(
    outputs: Gradient,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    create_graph: bool = False,
    keep_graph: bool = True,
) -> list[Tensor | None]:
    """Differentiate the outputs, summed with weights; None where nothing depends on an input.

    A graph that is not kept gives its memory back on the way, as in an ordinary backward pass.

    Outputs that are None or constant, such as the gradient of a linear loss, count as zero. Autocast is off, as for any
    backward pass.
    """
    live = [(o, w) for o, w in zip(outputs, weights, strict=True) if o is not None and o.requires_grad]
    if not live:
        return [None] * len(inputs)
    with explained_second_derivatives(), torch.autocast(inputs[0].device.type, enabled=False):
        results = torch.autograd.grad(
            [output for output, _ in live],
            inputs,
            [weight for _, weight in live],
            retain_graph=keep_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
        # torch refuses a reentrant checkpoint only where it stands between the outputs and an input; the parameters
        # inside it would look unused.
        if create_graph and any(result is None for result in results) and has_reentrant_checkpoint(live[0][0]):
            raise RuntimeError("a reentrant checkpoint is incompatible with .grad()")
    return list(results)


def has_reentrant_checkpoint(output: Tensor) -> bool:
    """Whether a reentrant checkpoint stands anywhere in the graph of the output."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return False


@contextmanager
def explained_second_derivatives() -> Iterator[None]:
    """Turn torch's complaint about a missing second derivative into one that names the way out."""
    try:
        yield
    except RuntimeError as error:
        if "a second time" in str(error):
            raise RuntimeError(
                "the graph of this loss is gone; refresh before loss.backward(), not after it, and let a function run "
                "its forward pass anew at every call (or pass the loss itself)"
            ) from error
        symptoms = (
            "is not implemented",
            "double backward",
            "incompatible with .grad()",
            "once_differentiable",
        )
        if not any(symptom in str(error) for symptom in symptoms):
            raise
        raise RuntimeError(
            f"this graph has no second derivative ({str(error).splitlines()[0]}). Ways out: run attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH); pass a function that runs the uncompiled model; "
            "use torch.utils.checkpoint with use_reentrant=False; run an LSTM without cuDNN; or use GaussNewton"
        ) from error

"""What torch.compile would save in products with the curvature, and after how many products it has paid for itself.

    python scripts/compiled_products.py

A Gauss-Newton product of a small network as one function of parameters and direction, and a Hessian product: eager and
compiled, on this processor. A C++ compiler must be there.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.functional import cross_entropy

from cao import GaussNewton, Hessian

Product = Callable[[Any, Any], Any]


def network(width: int) -> nn.Module:
    """Return a tanh network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def products(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Product]:
    """Return the products as functions of named parameters and a direction."""

    def outputs_of(params: Any) -> Tensor:
        return functional_call(model, params, (inputs,))  # type: ignore[no-any-return]

    def loss_of(outputs: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def loss_at(params: Any) -> Tensor:
        return loss_of(outputs_of(params))

    def gauss_newton(params: Any, direction: Any) -> Any:
        outputs, tangent, *_ = jvp(outputs_of, (params,), (direction,))
        weighted = jvp(grad(loss_of), (outputs,), (tangent,))[1]
        return vjp(outputs_of, params)[1](weighted)[0]

    def hessian(params: Any, direction: Any) -> Any:
        return jvp(grad(loss_at), (params,), (direction,))[1]

    return {"Gauss-Newton": gauss_newton, "Hessian": hessian}


def seconds_of(product: Product, params: Any, direction: Any, repeats: int = 30) -> float:
    """Return the median processor time of a product."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        product(params, direction)
        times.append(time.process_time() - began)
    return median(times)


def spent() -> float:
    """Return the processor time of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


def compare(name: str, product: Product, ours: Product, params: Any, direction: Any) -> str:
    """Return a line about one product: eager, as the library computes it, and compiled."""
    compiled = torch.compile(product)
    began = spent()
    try:
        found = compiled(params, direction)
    except Exception as error:
        return f"{name}: not compiled: {str(error).splitlines()[0]}"
    compiling = spent() - began
    expected = product(params, direction)
    wrong = max(float((found[key] - expected[key]).abs().max()) for key in params)
    eager, own, faster = (seconds_of(each, params, direction) for each in (product, ours, compiled))
    pays = f"{compiling / (own - faster):,.0f} products" if faster < own else "never"
    return (
        f"{name}: torch.func {1e3 * eager:.2f} ms, the library {1e3 * own:.2f} ms, compiled {1e3 * faster:.2f} ms; "
        f"compiling {compiling:.0f} s, pays after {pays}; differs by {wrong:.1g}"
    )


def batch_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss."""
    return cross_entropy(model(inputs), targets)


def multiplied(matrix: Any, column: Tensor, *_: Any) -> Tensor:
    """Return the library's product, whatever else is given."""
    return matrix @ column  # type: ignore[no-any-return]


def doubled() -> str:
    """Return what torch says of second derivatives through a compiled function, as residuals need them."""
    model, points = network(8), torch.randn(4, 64)
    outputs = torch.compile(model)(points)
    try:
        slopes = torch.autograd.grad(outputs.sum(), list(model.parameters()), create_graph=True)
        torch.autograd.grad(slopes[0].sum(), list(model.parameters()), allow_unused=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "they work"


def main() -> None:
    """Print, for two sizes, the times and the products after which compiling has paid."""
    sys.stdout.write(f"Second derivatives of a compiled function: {doubled()}\n")
    for width in (64, 512):
        model, inputs, targets = network(width), torch.randn(128, 64), torch.arange(128) % 10
        params = {name: p.detach() for name, p in model.named_parameters()}
        direction = {name: torch.randn_like(p) for name, p in params.items()}
        column = torch.cat([part.flatten() for part in direction.values()]).unsqueeze(1)
        matrices = {
            "Gauss-Newton": GaussNewton(model, inputs, partial(cross_entropy, target=targets)),
            "Hessian": Hessian(partial(batch_loss, model, inputs, targets), model.parameters()),
        }
        for name, product in products(model, inputs, targets).items():
            own = partial(multiplied, matrices[name], column)
            sys.stdout.write(f"{compare(f'{name}, width {width}', product, own, params, direction)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    # A cache would make a second run cheap; with one thread all compilers are children of this process.
    os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    main()

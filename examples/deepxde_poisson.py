"""SketchedLBFGS in DeepXDE: `model.compile(sketched_lbfgs(model))` for `model.compile("L-BFGS")`.

Run it with `python examples/deepxde_poisson.py` after `pip install deepxde`; it takes a few seconds. The equation is
−u″ = π² sin πx on [−1, 1] with u = 0 at both ends, whose solution is sin πx.
"""

import os

os.environ.setdefault("DDE_BACKEND", "pytorch")

import deepxde as dde
import numpy as np
import torch
from torch import Tensor

from cao.integrations.deepxde import sketched_lbfgs


def equation(x: Tensor, u: Tensor) -> Tensor:
    residual: Tensor = dde.grad.hessian(u, x) + np.pi**2 * torch.sin(np.pi * x)
    return residual


def main() -> None:
    dde.config.set_default_float("float64")  # In float32 any L-BFGS stops early.
    dde.config.set_random_seed(0)
    line = dde.geometry.Interval(-1, 1)
    ends = dde.icbc.DirichletBC(line, lambda _: 0.0, lambda _, is_on_boundary: is_on_boundary)
    model = dde.Model(
        dde.data.PDE(line, equation, ends, num_domain=32, num_boundary=2),
        dde.nn.FNN([1, 20, 20, 1], "tanh", "Glorot normal"),
    )
    model.compile("adam", lr=1e-3, verbose=0)
    model.train(iterations=200, verbose=0)
    model.compile(sketched_lbfgs(model), verbose=0)
    model.train(iterations=10, verbose=0)  # Of 20 iterations each.
    points = np.linspace(-1, 1, 200)[:, None]
    exact = np.sin(np.pi * points)
    error = np.linalg.norm(model.predict(points) - exact) / np.linalg.norm(exact)
    print(f"relative error {error:.1e} after {model.opt.status.evaluations} evaluations, {model.opt.status.reason}")


if __name__ == "__main__":
    main()

"""The curvature of a model that already exists: its sharpest directions, without changing anything about it.

Run it with `python examples/model_curvature.py`; it takes a few seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from cao import GaussNewton, Hessian, Lanczos
from cao.linalg.columns import HERE


def main() -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels[:512], dtype=torch.float32) / 16, torch.tensor(labels[:512])
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 10))
    params = list(model.parameters())
    start = HERE.random(sum(p.numel() for p in params), 1, torch.Generator().manual_seed(0))

    # The function is called as often as needed; batch-norm statistics and random streams stay as they are.
    hessian = Hessian(lambda: cross_entropy(model(inputs), targets), params)
    gauss_newton = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, targets))
    for name, operator in (("Hessian", hessian), ("Gauss-Newton", gauss_newton)):
        pairs = Lanczos(60, count=5, tolerance=1e-3)(operator, start)
        values = ", ".join(f"{value:.3f}" for value in pairs.values)
        print(f"{name}: {values} (largest residual {pairs.residuals.max():.1e}, {pairs.products} products)")


if __name__ == "__main__":
    main()

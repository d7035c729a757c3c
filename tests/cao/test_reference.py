"""The step on stretches of parameters is Algorithm 1 in a few lines on one vector."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import fixed
from torch import Tensor

from cao import Eigenpairs

SIZES = (3, 1, 7)


def reference_step(
    theta: Tensor, buffer: Tensor, g: Tensor, sketch: Eigenpairs, setting: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """Return θ − α d and the momentum buffer, with P = P̄/η = (B + ηI)⁻¹ of B = V diag(|λ|) Vᵀ."""
    eta, beta = setting["damping"], setting["momentum"]
    V = sketch.vectors
    B = V @ torch.diag(sketch.values.abs()) @ V.T
    P_bar = eta * torch.linalg.inv(B + eta * torch.eye(len(V), dtype=V.dtype))
    g = g + setting["weight_decay"] * theta
    g = g * min(1.0, setting["max_update_norm"] / float((P_bar @ g / eta).norm()))
    buffer = P_bar @ (beta * buffer + g)
    d = P_bar @ (g + beta * buffer) if setting["nesterov"] else buffer
    return theta - setting["lr"] / eta * d, buffer


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-50, 50), min_size=1, max_size=4),
    setting=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-3, 1),
            "damping": st.floats(1e-2, 10),
            "momentum": st.floats(0.1, 0.9),
            "weight_decay": st.floats(0, 0.1),
            "max_update_norm": st.floats(0.1, 100),
            "nesterov": st.booleans(),
        }
    ),
    seed=st.integers(0, 100),
)
def test_the_step_is_that_of_the_reference(values, setting, seed):
    generator = torch.Generator().manual_seed(seed)
    n = sum(SIZES)
    V = torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64)).Q
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    sketch = Eigenpairs(eigenvalues, V, torch.zeros_like(eigenvalues))
    theta, *gradients = torch.randn(4, n, generator=generator, dtype=torch.float64)
    params = [piece.clone().requires_grad_() for piece in theta.split(SIZES)]
    optimizer = fixed(params, rank=len(values), **setting)
    buffer = torch.zeros_like(theta)
    optimizer._progress.has_warned.append("edge")
    optimizer.refresh(sketch)
    for g in gradients:
        for param, piece in zip(params, g.split(SIZES), strict=True):
            param.grad = piece.clone()
        optimizer.step()
        theta, buffer = reference_step(theta, buffer, g, sketch, setting)
    torch.testing.assert_close(torch.cat([p.detach() for p in params]), theta, rtol=1e-8, atol=1e-9)

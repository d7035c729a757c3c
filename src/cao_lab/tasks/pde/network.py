"""The network of a physics-informed problem: tanh, Xavier normal, zero biases."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init


class Tanh(nn.Module):
    """A multilayer perceptron of two coordinates with tanh between its layers."""

    def __init__(self, width: int, depth: int, seed: int) -> None:
        super().__init__()
        sizes = [2, *[width] * depth, 1]
        # Drawn in float64 in every case, so that float32 starts at the same point up to rounding, and from a generator
        # of its own: the layers' usual start would draw from the global one.
        layers = [skip_init(nn.Linear, n, m, dtype=torch.float64) for n, m in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        generator = torch.Generator().manual_seed(seed)
        for layer in layers:
            nn.init.xavier_normal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "n 1"], t: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
        """Return the network's value at each point (x, t)."""
        hidden = torch.cat([x, t], dim=1)
        *inner, last = self.layers
        for layer in inner:
            hidden = torch.tanh(layer(hidden))
        value: Tensor = last(hidden)
        return value

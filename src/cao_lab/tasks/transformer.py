"""A small transformer that predicts the next character, of operations that can be differentiated twice."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

BLOCKS = 2
HEADS = 4


class Attention(nn.Module):
    """Causal attention. Written out, because torch's fused kernels have no second derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, inputs: Float[Tensor, "n length width"]) -> Float[Tensor, "n length width"]:
        """Return for each place a mean over itself and those before it."""
        samples, length, width = inputs.shape
        heads = self.project(inputs).view(samples, length, 3, HEADS, width // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(width // HEADS)
        future = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ values
        return self.join(mixed.transpose(1, 2).reshape(samples, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two layers, each on a normalised input and added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Float[Tensor, "n length width"]) -> Float[Tensor, "n length width"]:
        """Return the inputs with what was found added."""
        attended = inputs + self.attention(self.before(inputs))
        return attended + self.layers(self.between(attended))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Two blocks between an embedding and a linear layer; places are told by fixed sines."""

    positions: Tensor

    def __init__(self, classes: int, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, classes)
        self.register_buffer("positions", sines(length, width), persistent=False)

    def forward(self, characters: Shaped[Tensor, "n length"]) -> Float[Tensor, "n classes length"]:
        """Return the logits of each next character."""
        hidden = self.blocks(self.embedding(characters.long()) + self.positions.to(self.embedding.weight.dtype))
        return self.output(self.norm(hidden)).transpose(1, 2)  # type: ignore[no-any-return]


def sines(length: int, width: int) -> Float[Tensor, "length width"]:
    """Return waves of different lengths, by which places are told apart."""
    rates = torch.exp(-math.log(10_000) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

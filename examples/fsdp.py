"""Parameters, momentum and sketch sharded over processes by fully_shard (FSDP2).

Run it with `python examples/fsdp.py`, or on two processes with `torchrun --nproc-per-node 2 examples/fsdp.py`; it takes
a few seconds.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from cao import CAO


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    model = build()
    optimizer = CAO(model.parameters(), lr=0.5, rank=4, refresh_every=20, momentum=0.9)
    torch.manual_seed(dist.get_rank())  # Each process has data of its own.
    inputs = torch.randn(128, 20)
    labels = (inputs[:, :4] + inputs[:, 4:8].tanh()).argmax(dim=1)
    for step in range(41):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        # A function: the graph of `loss` leads to gathered parameters, not to the shards.
        optimizer.refresh_if_due(lambda: nn.functional.cross_entropy(model(inputs), labels))
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0 and optimizer.sketch:
            print(f"step {step}: loss {loss.item():.4f}, sharpest curvature {optimizer.sketch.values[0]:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""ResNet-18 and ResNet-34 for small images, with a width."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around which a shortcut leads."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n k i j"]:
        """Return relu(residual + shortcut)."""
        return relu(self.residual(images) + self.shortcut(images))


class ResNet(nn.Module):
    """A 3×3 stem without pooling, four stages that double the channels and halve the size, and a linear head.

    Weights start as torch initialises convolutions, linear layers and batch norm by default.
    """

    def __init__(self, depths: Sequence[int], classes: int, width: int, channels: int) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(4)]
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages = zip([width, *widths[:-1]], widths, depths, (1, 2, 2, 2), strict=True)
        self.stages = nn.Sequential(*[_stage(*stage) for stage in stages])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Return the logits of the classes."""
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def _stage(inputs: int, outputs: int, depth: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *[BasicBlock(outputs, outputs, 1) for _ in range(depth - 1)])


def resnet18(classes: int, width: int = 64, channels: int = 3) -> ResNet:
    """Return a ResNet-18 for images from 8×8 up; 64 is the width of the original."""
    return ResNet((2, 2, 2, 2), classes, width, channels)


def resnet34(classes: int, width: int = 64, channels: int = 3) -> ResNet:
    """Return a ResNet-34 for images from 8×8 up; 64 is the width of the original."""
    return ResNet((3, 4, 6, 3), classes, width, channels)

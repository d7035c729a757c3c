"""The models by name, from a linear one to the ResNets, each with its data, its loss and its L2 term."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from cao_lab.facts import MODELS
from cao_lab.tasks.data import Dataset, TaskError, prepare
from cao_lab.tasks.resnet import resnet18, resnet34
from cao_lab.tasks.transformer import HEADS, Transformer


def build_model(name: str, dataset: Dataset, width: int, seed: int) -> nn.Module:
    """Build a model for a dataset, its weights drawn from the seed alone and no other random number touched."""
    if name not in MODELS:
        raise TaskError(f"model must be one of {', '.join(MODELS)}, got {name}")
    with torch.random.fork_rng(devices=[]):
        # Unlike torch.manual_seed this leaves the generators of GPUs alone.
        torch.default_generator.manual_seed(seed)
        return _built(name, dataset, width)


def dataset_for(name: str, dataset: Dataset) -> Dataset:
    """Return the dataset with the targets of a model: for the autoencoder the inputs themselves."""
    if name != "autoencoder":
        return dataset
    return replace(
        dataset,
        train_targets=prepare(dataset, dataset.train_inputs),
        test_targets=prepare(dataset, dataset.test_inputs),
        classes=None,
        augment=False,
    )


def loss_function(name: str, dataset: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean loss of (outputs, targets): cross entropy, or squared error for regression."""
    return mse_loss if name == "autoencoder" or dataset.classes is None else cross_entropy


def regularizer(model: nn.Module, l2: float) -> Float[Tensor, ""]:
    """Return (l2/2)‖θ‖² over all trainable parameters."""
    squares = [parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad]
    return l2 / 2 * torch.stack(squares).sum()


def channels_last(inputs: Shaped[Tensor, "n ..."], model: nn.Module) -> Shaped[Tensor, "n ..."]:
    """Return images with the channels last, where a CPU trains the model faster that way and can do so safely.

    A narrow ResNet takes a fifth to a third less time per step. Gauss-Newton products gain as much; Hessian products
    lose, so they are taken in the default layout.
    """
    is_faster = inputs.ndim == 4 and inputs.device.type == "cpu"
    if not is_faster or any(overruns_with_channels_last(module) for module in model.modules()):
        return inputs
    return inputs.contiguous(memory_format=torch.channels_last)


def overruns_with_channels_last(module: nn.Module) -> bool:
    """Whether torch's CPU kernel may write past the end of its memory in the backward pass of this layer.

    On CPUs without AVX-512, torch 2.13 does so for a strided 1×1 convolution of fewer than 8 channels, as in the
    shortcuts of a ResNet of width below 8; docs/notebook.md has the minimal case.
    """
    if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1) or max(module.stride) == 1:
        return False
    return module.in_channels // module.groups < 8


class LogisticRegression(nn.Module):
    """One logit z as the pair (0, z), whose cross entropy is the logistic loss."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.logit = nn.Linear(features, 1)

    def forward(self, inputs: Float[Tensor, "n ..."]) -> Float[Tensor, "n 2"]:
        """Return the logits of both classes."""
        return pad(self.logit(inputs.flatten(1)), (1, 0))


def _built(name: str, dataset: Dataset, width: int) -> nn.Module:
    if name == "transformer":
        return _transformer(dataset, width)
    features = prod(dataset.train_inputs.shape[1:])
    outputs = dataset.classes or prod(dataset.train_targets.shape[1:])
    match name:
        case "linear":
            # Least squares, logistic or softmax regression, as the targets ask for.
            return _zeroed(LogisticRegression(features) if dataset.classes == 2 else _layers(features, outputs))
        case "mlp":
            return _layers(features, width, width, outputs)
        case "autoencoder":
            return _autoencoder(dataset.train_inputs.shape[1:], width)
    if dataset.train_inputs.ndim != 4 or dataset.classes is None:
        raise TaskError(f"{name} needs labelled images, got {tuple(dataset.train_inputs.shape[1:])} inputs")
    resnet = resnet18 if name == "resnet18" else resnet34
    return resnet(dataset.classes, width, channels=dataset.train_inputs.shape[1])


def _transformer(dataset: Dataset, width: int) -> nn.Module:
    if dataset.classes is None or dataset.train_targets.ndim != 2:
        raise TaskError("transformer needs a text: name the dataset pydoc")
    if width % (2 * HEADS):
        raise TaskError(f"width of a transformer must be a multiple of {2 * HEADS}, got {width}")
    return Transformer(dataset.classes, dataset.train_inputs.shape[1], width)


def _zeroed(model: nn.Module) -> nn.Module:
    """Start a convex problem at zero, where it knows nothing: on raw features random weights are confidently wrong."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _autoencoder(shape: torch.Size, width: int) -> nn.Module:
    """Narrow in three steps from width/2 to width/8 and widen again: 64-32-16-8-16-32-64 for digits."""
    if width < 8:
        raise TaskError(f"width of an autoencoder must be at least 8, got {width}")
    wide, middle, narrow = width // 2, width // 4, width // 8
    layers = _layers(prod(shape), wide, middle, narrow, middle, wide, prod(shape))
    return layers.append(nn.Unflatten(1, shape))


def _layers(*sizes: int) -> nn.Sequential:
    """Chain linear layers with tanh between them."""
    first, *others = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), first, *[part for layer in others for part in (nn.Tanh(), layer)])

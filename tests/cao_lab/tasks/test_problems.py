"""Each model is the textbook problem that its name says, and its weights come from the seed alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from small_cifar import write_small_cifar
from torch import Tensor, nn

from cao_lab.tasks.data import Dataset, batches, load, prepare
from cao_lab.tasks.problems import MODELS, build_model, channels_last, dataset_for, loss_function, regularizer
from cao_lab.tasks.resnet import resnet18


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def minimum(model: nn.Module, dataset: Dataset, l2: float) -> float:
    """Return the least regularised full-batch loss, found by L-BFGS in double precision."""
    model.double()
    inputs, targets = next(batches(dataset, None, seed=0, epoch=0))
    inputs, targets = inputs.double(), targets.double() if targets.is_floating_point() else targets
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_function("linear", dataset)(model(inputs), targets) + regularizer(model, l2)
        loss.backward()
        return loss

    optimizer.step(closure)
    return closure().item()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_weights_depend_on_the_seed_alone(digits: Dataset, name: str) -> None:
    torch.manual_seed(1)
    first = build_model(name, digits, 8, seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = build_model(name, digits, 8, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = build_model(name, digits, 8, seed=4).state_dict()
    # A convex problem starts at zero whatever the seed.
    assert (name == "linear") == all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("autoencoder", "transformer")])
def test_every_model_classifies_digits(digits: Dataset, name: str) -> None:
    images, labels = next(batches(digits, 32, seed=0, epoch=0))
    logits = build_model(name, digits, 8, seed=0)(images)
    assert logits.shape == (32, 10)
    expected = -torch.log_softmax(logits, 1)[torch.arange(32), labels].mean()
    assert torch.allclose(loss_function(name, digits)(logits, labels), expected)


def test_resnets_take_the_channels_and_classes_of_their_data(tmp_path: Path) -> None:
    write_small_cifar(tmp_path, "cifar100")
    dataset = load("cifar100", tmp_path)
    model = build_model("resnet18", dataset, 4, seed=0)
    assert model(next(batches(dataset, 2, seed=0, epoch=0))[0]).shape == (2, 100)


def test_linear_on_diabetes_is_least_squares() -> None:
    dataset = load("diabetes")
    inputs, targets = prepare(dataset, dataset.train_inputs).numpy(), dataset.train_targets.numpy()
    residuals = targets - LinearRegression().fit(inputs, targets).predict(inputs)
    model = build_model("linear", dataset, 64, seed=0)
    assert minimum(model, dataset, l2=0) == pytest.approx(np.mean(residuals**2), rel=1e-6)


def test_linear_on_breast_cancer_is_logistic_regression() -> None:
    dataset = load("breast-cancer")
    inputs = dataset.train_inputs / dataset.train_inputs.std(0)
    scaled = replace(dataset, train_inputs=inputs)
    model = build_model("linear", scaled, 64, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 31
    # A feature that is always 1 stands in for the intercept, which scikit-learn would not regularise.
    columns = np.column_stack([inputs.double().numpy(), np.ones(len(inputs))])
    fit = LogisticRegression(C=1 / (0.1 * len(columns)), fit_intercept=False, tol=1e-12, max_iter=10_000)
    weights = fit.fit(columns, dataset.train_targets.numpy()).coef_[0]
    signs = 2 * dataset.train_targets.numpy() - 1
    expected = np.logaddexp(0, -signs * (columns @ weights)).mean() + 0.05 * weights @ weights
    assert minimum(model, scaled, l2=0.1) == pytest.approx(expected, rel=1e-8)


def test_linear_on_digits_is_softmax_regression(digits: Dataset) -> None:
    columns = np.column_stack([prepare(digits, digits.train_inputs).flatten(1).double().numpy(), np.ones(1437)])
    labels = digits.train_targets.numpy()
    fit = LogisticRegression(C=1 / (0.1 * 1437), fit_intercept=False, tol=1e-12, max_iter=10_000)
    weights = fit.fit(columns, labels).coef_
    logits = columns @ weights.T
    cross_entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(1437), labels]
    expected = cross_entropy.mean() + 0.05 * (weights**2).sum()
    assert minimum(build_model("linear", digits, 64, seed=0), digits, l2=0.1) == pytest.approx(expected, rel=1e-8)


def test_mlp_has_two_hidden_tanh_layers(digits: Dataset) -> None:
    model = build_model("mlp", digits, 5, seed=0)
    first, second, last = [(p.detach() for p in m.parameters()) for m in model if isinstance(m, nn.Linear)]
    images = prepare(digits, digits.train_inputs[:4])
    hidden = images.reshape(4, 64)
    for weight, bias in (first, second):
        hidden = torch.tanh(hidden @ weight.T + bias)
    weight, bias = last
    assert torch.allclose(model(images), hidden @ weight.T + bias, atol=1e-6)


def test_mlp_predicts_one_number_for_regression() -> None:
    dataset = load("diabetes")
    inputs, targets = next(batches(dataset, 16, seed=0, epoch=0))
    outputs = build_model("mlp", dataset, 8, seed=0)(inputs)
    assert outputs.shape == targets.shape == (16, 1)
    assert torch.allclose(loss_function("mlp", dataset)(outputs, targets), (outputs - targets).square().mean())


def test_autoencoder_narrows_to_an_eighth_of_its_width(digits: Dataset) -> None:
    model = build_model("autoencoder", digits, 64, seed=0)
    sizes = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    assert sizes == [32, 16, 8, 16, 32, 64]


def test_autoencoder_is_trained_to_return_its_inputs(digits: Dataset) -> None:
    dataset = dataset_for("autoencoder", digits)
    images, targets = next(batches(dataset, 16, seed=0, epoch=0))
    assert torch.equal(images, targets)
    outputs = build_model("autoencoder", dataset, 64, seed=0)(images)
    expected = (outputs - images).square().sum() / (16 * 64)
    assert torch.allclose(loss_function("autoencoder", dataset)(outputs, targets), expected)
    assert dataset.classes is None


def test_other_models_keep_the_targets_of_the_dataset(digits: Dataset) -> None:
    assert dataset_for("mlp", digits) is digits


def test_the_regularizer_s_gradient_is_l2_times_the_weights(digits: Dataset) -> None:
    model = build_model("mlp", digits, 4, seed=0)
    regularizer(model, 0.3).backward()
    assert all(torch.allclose(p.grad, 0.3 * p) for p in model.parameters() if p.grad is not None)
    frozen = next(model.parameters()).requires_grad_(False)
    rest = sum(p.detach().square().sum().item() for p in model.parameters() if p is not frozen)
    assert regularizer(model, 0.3).item() == pytest.approx(0.15 * rest, rel=1e-5)


def test_impossible_models_are_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match=r"model must be one of resnet18, .* got vgg"):
        build_model("vgg", digits, 64, seed=0)
    with pytest.raises(ValueError, match="at least 8, got 4"):
        build_model("autoencoder", digits, 4, seed=0)
    with pytest.raises(ValueError, match=r"resnet18 needs labelled images, got \(30,\) inputs"):
        build_model("resnet18", load("breast-cancer"), 64, seed=0)


@pytest.mark.parametrize(("width", "is_last"), [(1, False), (2, False), (7, False), (8, True), (64, True)])
def test_channels_come_last_only_where_torch_s_kernel_stays_within_its_memory(width: int, is_last: bool) -> None:
    images = torch.zeros(2, 3, 8, 8)
    given = channels_last(images, resnet18(10, width))
    assert given.is_contiguous(memory_format=torch.channels_last) == is_last
    assert given.is_contiguous() != is_last


def test_features_have_no_layout_to_choose() -> None:
    features = torch.zeros(5, 4)
    assert channels_last(features, nn.Linear(4, 1)) is features


NARROW_TRAINING = """
import torch
from cao_lab.tasks.problems import channels_last
from cao_lab.tasks.resnet import resnet18

torch.set_num_threads(1)
model = resnet18(10, width=2)
for _ in range(20):
    model(channels_last(torch.randn(8, 3, 16, 16), model)).sum().backward()
"""


def test_a_narrow_resnet_trains_on_any_cpu() -> None:
    # In a process of its own: where memory is overrun, it is the process that dies.
    assert subprocess.run([sys.executable, "-c", NARROW_TRAINING], check=False).returncode == 0

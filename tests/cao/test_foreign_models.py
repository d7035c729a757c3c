"""Models with habits of their own: what a refresh must leave alone, and what it must not pass on to the user."""

import warnings

import pytest
import torch
from small_models import batch, loss_of, seeded, smooth_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_versions import runs_compiled_models_eagerly

from cao import CAO, GaussNewton
from cao.autograd.isolation import isolated_forward

CPU = torch.device("cpu")


def bounded_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2))


@pytest.mark.parametrize("kind", ["function", "gauss-newton"])
def test_a_refresh_leaves_embeddings_of_bounded_norm_alone(kind):
    model, words, labels = seeded(bounded_words), torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1])
    before, version = model[0].weight.detach().clone(), model[0].weight._version
    assert before.norm(dim=1).max() > 1
    sources = {
        "function": lambda: cross_entropy(model(words), labels),
        "gauss-newton": GaussNewton(model, words, lambda outputs: cross_entropy(outputs, labels)),
    }
    CAO(model.parameters(), 0.1).refresh(sources[kind])
    assert torch.equal(model[0].weight, before)
    assert model[0].weight._version == version
    assert model[0].max_norm == 1.0


class Encoder(nn.Module):
    """A transformer layer over sentences of which one is padded, as torch's fused inference path likes them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        padding = torch.zeros(inputs.shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        return self.head(self.encoder(inputs, src_key_padding_mask=padding)[:, 0])


def test_the_fast_path_of_transformers_is_off_in_a_refresh_and_back_after_it():
    with isolated_forward(CPU):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("kind", ["function", "gauss-newton"])
def test_a_transformer_encoder_has_one_curvature_in_training_and_evaluation_mode(kind):
    model, data, values = seeded(Encoder), batch(4, 5, 8), []
    for mode in (True, False):
        model.train(mode)
        optimizer = CAO(model.parameters(), 0.01, rank=2)
        operator = GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            optimizer.refresh(operator if kind == "gauss-newton" else lambda: loss_of(model, data))
        values.append(optimizer.sketch.values)
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@runs_compiled_models_eagerly
@pytest.mark.parametrize("kind", ["loss", "function", "gauss-newton"])
def test_a_compiled_model_trains_without_warnings_about_our_own_hooks(kind):
    model, data = smooth_network(), batch()
    compiled = torch.compile(model, backend="eager")
    optimizer = CAO(model.parameters(), 0.1, refresh_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            loss = loss_of(compiled, data)
            source = {
                "loss": loss,
                "function": lambda: loss_of(compiled, data),
                "gauss-newton": GaussNewton(compiled, data[0], lambda outputs: cross_entropy(outputs, data[1])),
            }[kind]
            optimizer.zero_grad()
            optimizer.refresh_if_due(source)
            loss.backward()
            optimizer.step()


def test_warnings_of_the_model_itself_come_through_a_refresh():
    class Complaining(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            warnings.warn("the inputs are not standardised", stacklevel=2)
            return super().forward(inputs)

    model, data = Complaining(3, 2).double(), batch()
    with pytest.warns(UserWarning, match="not standardised"):
        CAO(model.parameters(), 0.1).refresh(lambda: loss_of(model, data))

import pytest
import torch
from torch.nn.functional import cross_entropy

from cao_lab.tasks import text
from cao_lab.tasks.data import load
from cao_lab.tasks.problems import build_model
from cao_lab.tasks.transformer import Transformer

CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"


def decoded(codes):
    return "".join(CHARACTERS[code] for code in codes)


def test_the_text_is_pythons_own_and_survives_the_encoding():
    train, test = text.windows()
    assert 'The "if" statement' in decoded(torch.from_numpy(train)[:, :-1].flatten().tolist())
    assert len(test) == pytest.approx(0.2 * (len(train) + len(test)), abs=1)
    assert decoded(text.encoded("if x:\n\tpass — é").tolist()) == "if x:\n pass    "


def test_each_target_is_the_character_that_follows():
    dataset = load("pydoc")
    assert dataset.classes == len(CHARACTERS) == 96
    assert torch.equal(dataset.train_inputs[:, 1:].long(), dataset.train_targets[:, :-1])
    assert dataset.train_targets[0, -1] == dataset.train_inputs[1, 0]


def test_no_character_is_predicted_from_those_after_it():
    model = Transformer(classes=96, length=8, width=16).double()
    one = torch.randint(96, (1, 8))
    other = one.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 96
    before, after = model(one), model(other)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.equal(before[:, :, 5:], after[:, :, 5:])


def test_the_order_of_characters_matters():
    model = Transformer(classes=96, length=3, width=16)
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(one)[..., -1], model(other)[..., -1])


def test_its_hessian_is_that_of_finite_differences():
    torch.manual_seed(0)
    model = Transformer(classes=5, length=4, width=8).double()
    inputs, targets = torch.randint(5, (2, 4)), torch.randint(5, (2, 4))
    params = list(model.parameters())
    direction = [torch.randn_like(p) for p in params]

    def gradient():
        return torch.autograd.grad(cross_entropy(model(inputs), targets), params, create_graph=True)

    exact = torch.autograd.grad(gradient(), params, direction)
    step, ends = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(params, direction, strict=True):
                p.add_(d, alpha=sign * step)
        ends.append([g.detach() for g in gradient()])
    for h, above, below in zip(exact, *ends, strict=True):
        assert torch.allclose(h, (above - below) / (2 * step), atol=1e-6)


def test_a_transformer_without_a_text_is_refused():
    with pytest.raises(ValueError, match="transformer needs a text: name the dataset pydoc"):
        build_model("transformer", load("digits"), width=16, seed=0)
    with pytest.raises(ValueError, match="must be a multiple of 8, got 12"):
        build_model("transformer", load("pydoc"), width=12, seed=0)

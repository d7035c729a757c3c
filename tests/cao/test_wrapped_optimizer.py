from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import smooth_network, train

from cao import CAO


class HandsOn:
    """A wrapper like those of Lightning and Fabric: CAO's methods, the wrapped optimizer's attributes, none of its own.

    A method called on it would leave what it assigns on the wrapper, where the wrapped optimizer never sees it.
    """

    def __init__(self, optimizer: CAO) -> None:
        object.__setattr__(self, "_optimizer", optimizer)
        object.__setattr__(self, "__class__", type("HandsOnCAO", (HandsOn, CAO), {}))

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} would live on the wrapper only")


def test_no_method_leaves_an_attribute_on_a_wrapper():
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    train(model, HandsOn(optimizer), BATCHES)
    assert_as_in_the_plain_loop(model, optimizer)

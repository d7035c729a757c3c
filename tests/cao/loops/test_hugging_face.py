from accelerate import Accelerator
from reference_loop import BATCHES, SETTINGS, assert_as_in_the_plain_loop
from small_models import loss_of, smooth_network

from cao import CAO


def test_accelerate_takes_the_steps_of_a_plain_loop():
    accelerator = Accelerator(cpu=True)
    network = smooth_network()
    model, optimizer = accelerator.prepare(network, CAO(network.parameters(), 0.1, **SETTINGS))
    for data in BATCHES:
        loss = loss_of(model, data)
        optimizer.zero_grad()
        # Accelerate's wrapper hands on none of our methods; the optimizer itself is its attribute.
        optimizer.optimizer.refresh_if_due(loss)
        accelerator.backward(loss)
        optimizer.step()
    assert_as_in_the_plain_loop(network, optimizer.optimizer)

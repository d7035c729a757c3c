import pytest
import torch

from cao import CAO, Eigenpairs


def end_of_alternating_sketches(share: float, every: int, *, momentum: float = 0.9, ratio: float = 100.0) -> float:
    """Minimise ½‖θ‖² at a share of the stable rate, its two directions captured in turns; return how far it got."""
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    damping = 1 / ratio
    lr = share * 2 * (1 + momentum) * damping
    optimizer = CAO([theta], lr, damping=damping, momentum=momentum, refresh_every=every)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for step in range(300):
        optimizer.zero_grad()
        if step % every == 0:
            axis = torch.eye(2, dtype=torch.float64)[:, [step // every % 2]]
            optimizer.refresh(Eigenpairs(one, axis, zero))
        (theta.square().sum() / 2).backward()
        optimizer.step()
    return float(theta.detach().norm())


@pytest.mark.filterwarnings("ignore:the effective step")
@pytest.mark.parametrize("share", [0.05, 0.2, 0.3, 0.5])
def test_momentum_survives_exact_sketches_that_alternate(share):
    """With momentum on the preconditioned gradient this grows by a tenth at every step: a parametric oscillator."""
    assert end_of_alternating_sketches(share, 5) < 0.1


@pytest.mark.filterwarnings("ignore:the effective step")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_long_intervals_leave_the_whole_stable_range(share):
    assert end_of_alternating_sketches(share, 20) < 0.1


def test_momentum_with_the_signed_rule_is_refused():
    with pytest.raises(ValueError, match=r'"signed" needs momentum to be 0, got 0.9: .* amplify'):
        CAO([torch.zeros(2, requires_grad=True)], 0.1, momentum=0.9, negative_curvature="signed")

"""The account of the time that looks take."""

from itertools import cycle

import pytest
import torch

from cao.clock import Clock


@pytest.mark.parametrize("prices", [(1.0,), (1.0, 1.0, 7.0), (6.0, 2.0, 1.0)])
def test_looks_of_any_price_keep_to_the_budget_once_the_dearest_is_known(prices, monkeypatch):
    now, shares, due = [0.0], [], 0
    monkeypatch.setattr(Clock, "_now", lambda clock: now[0])
    clock, price = Clock(torch.device("cpu")), cycle(prices)
    for step in range(1, 20_001):
        clock.begin()
        if step > due:
            with clock.looking():
                now[0] += next(price)
            shares.append(clock.share)
        now[0] += 1
        due = step + clock.wait(0.05, step)
    assert len(shares) > 100
    assert max(shares[len(prices) :]) <= 0.05
    assert clock.share > 0.049

"""When a training is told to stop, and when it has diverged."""

import math
import os
import signal

import pytest
import torch

from spatially.train.guard import Diverged, Signals, Stopped, check_losses, exit_code, weights_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_step_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(Diverged, match=rf"the loss is {bad} at step 11; kept here\. A smaller optimiser\.lr"):
        check_losses([1.0, bad, 1.0], first_step=10, limit=7.0, above=0, kept="kept here")


def test_spikes_are_no_explosion_but_twenty_steps_in_a_row_are() -> None:
    above = 0
    for first in range(0, 200, 10):
        above = check_losses([9.0] * 9 + [1.0], first_step=first, limit=7.0, above=above, kept="")
    assert above == 0
    above = check_losses([9.0] * 19, first_step=0, limit=7.0, above=above, kept="")
    assert above == 19
    with pytest.raises(Diverged, match=r"the loss was above 7 for 20 steps, up to step 19"):
        check_losses([9.0, 1.0], first_step=19, limit=7.0, above=above, kept="")


def test_signals_are_remembered_inside_and_left_alone_outside() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):  # who presses Ctrl-C while it is stopping is in a hurry
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_exit_codes() -> None:
    assert exit_code(signal.SIGTERM) == 0
    assert exit_code(signal.SIGINT) == 130
    assert Stopped(0).code == 0


def test_weights_finite() -> None:
    model = torch.nn.Linear(2, 2)
    assert weights_finite(model)
    with torch.no_grad():
        model.bias[1] = math.nan
    assert not weights_finite(model)

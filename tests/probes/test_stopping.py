"""Early stopping: it stops when the interval is narrow, and its result does not depend on how chunks were measured."""

import numpy as np
import pytest

from spatially.errors import UserError
from spatially.probes.intervals import anytime
from spatially.probes.stopping import Stopping, check_precision


def test_stops_as_soon_as_the_interval_is_narrow_enough() -> None:
    stopping = Stopping(0.05, (2,))
    easy, hard = np.ones(50), np.tile([0.0, 1.0], 25)
    stopped_at = [None, None]
    for chunk in range(60):
        stopping.update(np.stack([easy, hard], axis=1))
        for point in range(2):
            if stopping.stopped[point] and stopped_at[point] is None:
                stopped_at[point] = (chunk + 1) * 50
    for point, mean in enumerate((1.0, 0.5)):
        count = stopped_at[point]
        low, high = anytime(mean * count, count)
        assert high - low <= 0.1
        low, high = anytime(mean * (count - 50), count - 50)
        assert high - low > 0.1
    assert stopped_at[0] < stopped_at[1]
    assert stopping.count.tolist() == stopped_at


def test_outcomes_after_the_stop_do_not_count() -> None:
    generator = np.random.default_rng(0)
    chunks = (generator.random((40, 100, 3)) < [0.99, 0.9, 0.5]).astype(float)
    lazy, eager = Stopping(0.04, (3,)), Stopping(0.04, (3,))
    for chunk in chunks:
        lazy.update(np.where(lazy.stopped, np.nan, chunk))
        eager.update(chunk)
    assert np.array_equal(lazy.right, eager.right)
    assert np.array_equal(lazy.count, eager.count)


@pytest.mark.parametrize("precision", [0, -0.1, 0.5, float("nan")])
def test_precision_outside_is_named(precision: float) -> None:
    with pytest.raises(UserError, match="precision must lie"):
        check_precision(precision)

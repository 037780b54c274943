"""Intervals against SciPy, exact integrals, and their promised coverage."""

import numpy as np
import pytest
from scipy import integrate, stats

from spatially.probes.intervals import anytime, difference, lost_share, student, wilson


@pytest.mark.parametrize(("successes", "count"), [(0, 5), (3, 7), (10, 10), (400, 1000)])
def test_wilson_agrees_with_scipy(successes: int, count: int) -> None:
    expected = stats.binomtest(successes, count).proportion_ci(method="wilson")
    assert np.allclose(wilson(successes, count), (expected.low, expected.high))


def test_student_agrees_with_scipy() -> None:
    values = np.random.default_rng(0).uniform(0.4, 0.6, 12)
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert np.allclose(student(values.mean(), values.std(ddof=1), 12), (expected.low, expected.high))
    assert np.isnan(student(0.5, 0.0, 1)).all()


@pytest.mark.parametrize(("total", "count"), [(0, 4), (30, 100), (99.5, 120)])
def test_anytime_ends_where_the_mixture_says(total: float, count: int) -> None:
    def evidence(p: float) -> float:
        prior = stats.beta(0.5, 0.5)

        def ratio(q: float) -> float:
            return np.exp(total * np.log(q / p) + (count - total) * np.log((1 - q) / (1 - p))) * prior.pdf(q)

        return integrate.quad(ratio, 0, 1, points=[total / count], limit=200)[0]

    for end in anytime(total, count):
        if 0 < end < 1:
            assert np.isclose(evidence(float(end)), 20, rtol=1e-3)


def test_anytime_covers_at_all_times_at_once() -> None:
    generator = np.random.default_rng(1)
    counts, missed = np.arange(1, 1501), 0
    for _ in range(300):
        low, high = anytime(np.cumsum(generator.random(1500) < 0.3), counts)
        missed += bool(((low > 0.3) | (high < 0.3)).any())
    assert missed / 300 < 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5


def test_anytime_knows_nothing_before_the_first_image() -> None:
    assert [float(end) for end in anytime(0, 0)] == [0, 1]


@pytest.mark.parametrize(("clean", "kept", "count"), [(0.8, 0.5, 200), (0.9, 0.98, 300), (0.5, 0.3, 150)])
def test_lost_share_covers(clean: float, kept: float, count: int) -> None:
    generator = np.random.default_rng(2)
    truth = np.clip(1 - (clean * kept - 0.1) / (clean - 0.1), 0, 1)
    hits = 0
    for _ in range(600):
        before = (generator.random(count) < clean).astype(float)
        after = before * (generator.random(count) < kept)
        _, low, high = lost_share(after, before, 0.1)
        hits += low <= truth <= high
    assert hits / 600 > 0.95 - 3.5 * (0.05 * 0.95 / 600) ** 0.5


def test_lost_share_of_what_never_changes_is_zero_but_not_certain() -> None:
    before = np.array([1.0] * 60 + [0.0] * 40)
    estimate, low, high = lost_share(before, before, 0.1)
    assert (estimate, low) == (0, 0)
    assert 0 < high < 0.1


def test_lost_share_is_undefined_at_chance() -> None:
    assert np.isnan(lost_share(np.zeros(10), np.array([1.0] + [0.0] * 9), 0.1)).all()


def test_lost_share_is_cut() -> None:
    assert lost_share(np.zeros(50), np.ones(50), 0.2)[0] == 1
    assert lost_share(np.ones(50), np.array([1.0] * 40 + [0.0] * 10), 0.2)[0] == 0


@pytest.mark.parametrize(("lost", "won", "count"), [(0.3, 0.02, 50), (0.05, 0.05, 200), (0.01, 0.0, 40)])
def test_difference_of_paired_shares_covers(lost: float, won: float, count: int) -> None:
    change = np.random.default_rng(0).choice([1, -1, 0], p=[lost, won, 1 - lost - won], size=(count, 4000))
    low, high = difference(change == 1, change == -1)  # the others are right, or wrong, both times
    covered = (low <= lost - won) & (lost - won <= high)
    assert covered.mean() > 0.93
    assert (high > low).all()
    estimate = change.mean(axis=0)
    assert ((low <= estimate) & (estimate <= high)).all()
    assert np.allclose(difference(change == -1, change == 1), (-high, -low))

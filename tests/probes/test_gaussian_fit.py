"""Fits of maps whose Gaussian is known."""

import numpy as np
import pytest

from spatially.errors import UserError
from spatially.probes.gaussian_fit import fit_gaussian


def gaussian(shape: tuple[int, int], *, x: float, y: float, sigma_x: float, sigma_y: float) -> np.ndarray:
    down, across = np.mgrid[: shape[0], : shape[1]]
    return np.exp(-((across - x) ** 2) / (2 * sigma_x**2) - (down - y) ** 2 / (2 * sigma_y**2))


@pytest.mark.parametrize(
    ("shape", "centre", "sigma"),
    [
        ((14, 14), (6, 6), (5, 5)),
        ((14, 14), (2.5, 10.2), (3, 3)),  # off-centre
        ((14, 14), (7, 5), (8, 1.5)),  # elongated
        ((7, 12), (11, 0), (4, 2)),  # in a corner of a rectangle
        ((7, 7), (3, 3), (30, 30)),  # far wider than the grid
        ((64, 64), (30, 33), (0.6, 0.6)),  # little more than a pixel
    ],
)
def test_noiseless_gaussian_reads_itself(
    shape: tuple[int, int], centre: tuple[float, float], sigma: tuple[float, float]
) -> None:
    map = 3e-4 * gaussian(shape, x=centre[0], y=centre[1], sigma_x=sigma[0], sigma_y=sigma[1]) - 0.2
    found = fit_gaussian(map)
    assert found.r_squared == pytest.approx(1, abs=1e-9)
    assert (found.sigma_x, found.sigma_y) == pytest.approx(sigma, rel=1e-4)
    assert (found.x, found.y) == pytest.approx(centre, abs=1e-3)
    assert found.amplitude == pytest.approx(3e-4, rel=1e-3)


def test_a_constant_changes_nothing() -> None:
    generator = np.random.default_rng(0)
    map = gaussian((14, 14), x=6, y=6, sigma_x=3, sigma_y=4) + 0.1 * generator.normal(size=(14, 14))
    one, other = fit_gaussian(map), fit_gaussian(map + 7)
    assert one.r_squared == pytest.approx(other.r_squared, abs=1e-6)
    assert one.sigma_x == pytest.approx(other.sigma_x, rel=1e-4)


def test_the_paper_s_baseline_is_too_narrow_where_the_grid_cuts_the_tails() -> None:
    found = fit_gaussian(gaussian((14, 14), x=6, y=6, sigma_x=5, sigma_y=5), baseline="minimum")
    assert found.sigma_x == pytest.approx(4.3274, abs=1e-3)
    assert found.r_squared == pytest.approx(0.99528, abs=1e-4)
    narrow = fit_gaussian(gaussian((30, 30), x=14, y=15, sigma_x=2, sigma_y=3), baseline="minimum")
    assert narrow.r_squared == pytest.approx(1, abs=1e-6)
    assert (narrow.sigma_x, narrow.sigma_y) == pytest.approx((2, 3), abs=1e-3)


def test_r_squared_is_the_share_of_the_variance_that_is_explained() -> None:
    """Against the definition, with the residual computed here."""
    generator = np.random.default_rng(1)
    map = gaussian((20, 16), x=8, y=9, sigma_x=4, sigma_y=3) + 0.2 * generator.normal(size=(20, 16))
    found = fit_gaussian(map)
    best = found.amplitude * gaussian((20, 16), x=found.x, y=found.y, sigma_x=found.sigma_x, sigma_y=found.sigma_y)
    assert found.r_squared == pytest.approx(1 - np.var(map - best) / np.var(map), abs=1e-9)
    for name in ("x", "y", "sigma_x", "sigma_y"):  # and no Gaussian nearby is better
        for step in (-0.05, 0.05):
            moved = {
                key: getattr(found, key) + (step if key == name else 0) for key in ("x", "y", "sigma_x", "sigma_y")
            }
            assert 1 - np.var(map - found.amplitude * gaussian((20, 16), **moved)) / np.var(map) < found.r_squared


def test_noise_is_no_gaussian_and_a_dip_is_none_either() -> None:
    noise = fit_gaussian(np.random.default_rng(2).normal(size=(14, 14)))
    assert -1e-9 <= noise.r_squared < 0.1
    assert abs(fit_gaussian(-gaussian((14, 14), x=6, y=6, sigma_x=2, sigma_y=2)).r_squared) < 0.3


def test_one_spot_of_several_is_found() -> None:
    map = np.zeros((12, 12))
    for y, x, height in ((2, 2, 1.0), (2, 8, 0.9), (8, 2, 0.9), (8, 8, 0.9)):
        map[y : y + 2, x : x + 2] = height
    spot = gaussian((12, 12), x=2.5, y=2.5, sigma_x=0.7, sigma_y=0.7)
    explained = np.corrcoef(map.ravel(), spot.ravel())[0, 1] ** 2
    found = fit_gaussian(map)
    assert found.r_squared >= explained > 0.25
    assert (found.x, found.y) == pytest.approx((2.5, 2.5), abs=0.1)


@pytest.mark.parametrize("map", [np.ones((5, 5)), np.full((5, 5), np.nan), np.eye(2), np.arange(9.0)[None]])
def test_what_has_no_fit_says_so(map: np.ndarray) -> None:
    assert np.isnan(fit_gaussian(map).r_squared)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="unknown baseline 'mean'"):
        fit_gaussian(np.eye(4), baseline="mean")
    with pytest.raises(UserError, match="rows and columns"):
        fit_gaussian(np.ones(5))

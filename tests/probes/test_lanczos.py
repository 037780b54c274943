"""Lanczos against dense spectra: multiplicities, invariant subspaces, restarts, bounds that hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spatially.errors import UserError
from spatially.probes.lanczos import BOTH_ENDS, MAGNITUDE, Spectrum, lanczos


def rotated(eigenvalues: object, seed: int = 0) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    values = np.asarray(eigenvalues, dtype=float)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))
    matrix = turn @ np.diag(values) @ turn.T
    return torch.from_numpy((matrix + matrix.T) / 2)


def search(matrix: torch.Tensor, **options: object) -> Spectrum:
    def draw(number: int) -> torch.Tensor:
        noise = np.random.default_rng([7, number]).standard_normal(len(matrix))
        return torch.from_numpy(noise).to(matrix.dtype)

    return lanczos(lambda vector: matrix @ vector, draw, **{"tolerance": 1e-10, "products": 1000, **options})


def expected(eigenvalues: object, count: int, which: str = MAGNITUDE) -> np.ndarray:
    values = np.sort(np.asarray(eigenvalues, dtype=float))[::-1]
    if which == BOTH_ENDS:
        return values if 2 * count >= len(values) else np.concatenate([values[:count], values[-count:]])
    return np.sort(np.abs(values))[::-1][:count]


@settings(deadline=None, max_examples=200)
@given(
    eigenvalues=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    count=st.integers(1, 6),
    which=st.sampled_from([MAGNITUDE, BOTH_ENDS]),
    room=st.sampled_from([30, 64]),
    seed=st.integers(0, 100),
)
def test_whole_numbers_with_all_their_copies(
    eigenvalues: list[int], count: int, which: str, room: int, seed: int
) -> None:
    found = search(rotated(eigenvalues, seed), count=count, which=which, room=room, confirm=True)
    values = np.abs(found.values) if which == MAGNITUDE else found.values
    np.testing.assert_allclose(values, expected(eigenvalues, count, which), atol=1e-8)
    assert found.converged.all()


def test_small_eigenvalues_beside_a_huge_one() -> None:
    bulk = np.random.default_rng(0).uniform(-1.5, 1.5, 300)
    found = search(rotated([1000, 3, 2.5, 2, 1.8, *bulk]), count=5, tolerance=1e-3)
    np.testing.assert_allclose(found.values, [1000, 3, 2.5, 2, 1.8], rtol=1e-3)
    assert found.converged.all()


def test_the_many_zeros_at_the_end_of_a_convex_spectrum() -> None:
    eigenvalues = [14, 13, 10, 0.6, *np.linspace(0.05, 0.3, 30), *([0] * 200)]
    for sign in (1, -1):
        matrix = sign * rotated(eigenvalues)
        found = search(matrix, count=4, which=BOTH_ENDS, tolerance=1e-3)
        np.testing.assert_allclose(np.sort(sign * found.values)[::-1], [14, 13, 10, 0.6, 0, 0, 0, 0], atol=1e-3)
        assert found.converged.all()
        assert not search(matrix, count=4, which=BOTH_ENDS, tolerance=1e-3, products=20).converged.all()


@pytest.mark.parametrize("room", [12, 17, 64, 400])
@pytest.mark.parametrize("which", [MAGNITUDE, BOTH_ENDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_restarts_and_precisions(room: int, which: str, dtype: torch.dtype) -> None:
    eigenvalues = np.random.default_rng(3).standard_normal(300) ** 3
    count, exact = (5, 1e-9) if which == MAGNITUDE else (2, 1e-9)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    found = search(
        rotated(eigenvalues).to(dtype), room=room, which=which, count=count, tolerance=tolerance, vectors=True
    )
    values = np.abs(found.values) if which == MAGNITUDE else found.values
    scale = np.abs(eigenvalues).max()
    np.testing.assert_allclose(
        values, expected(eigenvalues, count, which), atol=exact if dtype == torch.float64 else 3e-6 * scale
    )
    assert found.converged.all()
    assert found.vectors is not None
    gram = (found.vectors.double() @ found.vectors.double().T).numpy()
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("products", [6, 10, 20, 35])
def test_residuals_are_what_they_say(products: int) -> None:
    """Computed from the recurrence, they are the norms of Av − λv, converged or not, over restarts too."""
    matrix = rotated(np.random.default_rng(4).standard_normal(200))
    found = search(matrix, products=products, room=12, vectors=True)
    assert found.vectors is not None
    assert found.products <= products
    true = (found.vectors @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors).norm(dim=1).numpy()
    np.testing.assert_allclose(found.residuals, true, rtol=1e-6, atol=1e-13)
    nearest = np.abs(np.linalg.eigvalsh(matrix.numpy())[:, None] - found.values).min(axis=0)
    assert (nearest <= true + 1e-13).all()
    assert not found.converged.all()


def test_residuals_bound_the_error_after_rounds() -> None:
    eigenvalues = [10, 10, -8, -8, 5, *np.random.default_rng(0).standard_normal(300)]
    matrix = rotated(eigenvalues)
    found = search(matrix, tolerance=1e-3, confirm=True, room=14, vectors=True)
    assert found.vectors is not None
    np.testing.assert_allclose(found.values, [10, 10, -8, -8, 5], atol=1e-3)
    true = (found.vectors @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors).norm(dim=1).numpy()
    assert (true <= found.residuals + 1e-12).all()


def test_confirmation_costs_little_and_finds_copies() -> None:
    eigenvalues = [10, 10, 9, 8, 7, *np.random.default_rng(0).standard_normal(500)]
    alone = search(rotated(eigenvalues), count=3, tolerance=1e-3)
    sure = search(rotated(eigenvalues), count=3, tolerance=1e-3, confirm=True)
    np.testing.assert_allclose(alone.values, [10, 9, 8], atol=1e-2)
    np.testing.assert_allclose(sure.values, [10, 10, 9], atol=1e-2)
    assert sure.products < 4 * alone.products
    cut = search(rotated(eigenvalues), count=3, tolerance=1e-3, confirm=True, products=alone.products + 2)
    assert not cut.converged.any()  # what was to be confirmed was not


def test_degenerate_operators() -> None:
    np.testing.assert_array_equal(search(torch.zeros(9, 9).double()).values, np.zeros(5))
    np.testing.assert_allclose(search(3 * torch.eye(50).double()).values, np.full(5, 3.0))
    np.testing.assert_allclose(search(torch.tensor([[-2.0]]).double()).values, [-2])
    np.testing.assert_allclose(search(rotated([4, 2, -7])).values, [-7, 4, 2], atol=1e-12)
    one = rotated([6.0] + [0.0] * 99)
    found = search(one)
    np.testing.assert_allclose(found.values, [6, 0, 0, 0, 0], atol=1e-12)
    assert found.converged.all()


def test_shift_chooses_and_is_not_added() -> None:
    eigenvalues = [-5, 4.9, 3, 1, *np.linspace(-0.5, 0.5, 50)]
    np.testing.assert_allclose(search(rotated(eigenvalues), count=1).values, [-5], atol=1e-8)
    np.testing.assert_allclose(search(rotated(eigenvalues), count=1, shift=0.2).values, [4.9], atol=1e-8)


def test_limit_of_products() -> None:
    found = search(rotated(np.random.default_rng(0).standard_normal(200)), products=8)
    assert found.products == 8
    assert not found.converged.all()
    with pytest.raises(UserError, match="products at least 5"):
        search(torch.eye(9).double(), products=4)


def test_an_operator_that_is_not_symmetric_is_noticed() -> None:
    matrix = rotated(np.arange(30.0))
    assert search(matrix).asymmetry < 1e-12
    skew = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 30)))
    assert search(matrix + 3 * (skew - skew.T), products=30).asymmetry > 0.02


def test_not_finite() -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        search(torch.full((5, 5), torch.nan).double())


def test_copies_are_looked_for_where_the_basis_closes_early() -> None:
    """Three different eigenvalues: three products span all that one starting vector sees."""
    found = search(rotated([5.0] * 3 + [3.0] * 3 + [1.0] * 20), count=2)
    np.testing.assert_allclose(found.values, [5, 5], atol=1e-10)
    assert found.converged.all()
    assert found.products > 4


def test_rounds_of_a_symmetric_operator_show_no_asymmetry() -> None:
    """What was kept with a residual is coupled to the new vectors both ways."""
    matrix = rotated([10, 10, -8, -8, 5, *np.random.default_rng(0).standard_normal(300)])
    found = search(matrix, tolerance=0.05, confirm=True, room=14)
    assert found.products > 30
    assert found.asymmetry < 1e-12


def test_residuals_hold_for_an_operator_that_is_not_quite_symmetric() -> None:
    skew = np.random.default_rng(0).standard_normal((30, 30))
    matrix = rotated(np.arange(30.0)) + 1e-3 * torch.from_numpy(skew - skew.T)
    found = search(matrix, vectors=True, tolerance=1e-12, products=60)
    assert found.vectors is not None
    image = (matrix @ found.vectors.T).T
    true = (image - torch.from_numpy(found.values)[:, None] * found.vectors).norm(dim=1).numpy()
    assert true.min() > 1e-4
    assert (true <= found.residuals + 1e-12).all()

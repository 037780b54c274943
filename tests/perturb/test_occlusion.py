"""Which pixels an occlusion takes, and that it takes no others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spatially.errors import UserError
from spatially.perturb import occlude
from spatially.perturb.occlusion import Rectangle, rectangle


def test_the_centre_half_of_224() -> None:
    images = torch.rand(2, 3, 224, 224) * 0.9 + 0.1
    occluded = occlude(images)
    inside = torch.zeros(224, 224, dtype=torch.bool)
    inside[56:168, 56:168] = True
    assert (occluded[:, :, inside] == 0).all()
    assert torch.equal(occluded[:, :, ~inside], images[:, :, ~inside])
    assert int(inside.sum()) == 112 * 112
    assert images.min() >= 0.1  # the images themselves are as before


@pytest.mark.parametrize(
    ("size", "place", "image", "expected"),
    [
        (0.5, "centre", (9, 12), Rectangle(2, 3, 4, 6)),
        (3, "centre", (8, 8), Rectangle(2, 2, 3, 3)),
        ((2, 0.5), "centre", (8, 8), Rectangle(3, 2, 2, 4)),
        (4, (0, 4), (8, 8), Rectangle(0, 4, 4, 4)),
        (1.0, "centre", (5, 7), Rectangle(0, 0, 5, 7)),
        (1, "centre", (5, 7), Rectangle(2, 3, 1, 1)),
    ],
)
def test_where_it_lies(size: object, place: object, image: tuple[int, int], expected: Rectangle) -> None:
    assert rectangle(size, place, image) == expected  # type: ignore[arg-type]


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_a_share_takes_its_share(height: int, width: int, share: float, dtype: torch.dtype) -> None:
    images = torch.ones(1, 3, height, width, dtype=dtype)
    occluded = occlude(images, size=share, value=0.25)
    assert occluded.dtype == dtype
    assert int((occluded == 0.25).sum()) == 3 * round(share * height) * round(share * width)
    assert int((occluded == 1).sum()) == images.numel() - int((occluded == 0.25).sum())


@pytest.mark.parametrize("size", [0, -1, 1.5, -0.1, True, "half", (1, 2, 3), float("nan")])
def test_a_size_that_means_nothing(size: object) -> None:
    with pytest.raises(UserError, match="share of the side"):
        occlude(torch.rand(1, 3, 8, 8), size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "place"), [(9, "centre"), (4, (5, 0)), (4, (0, 5))])
def test_what_does_not_fit(size: int, place: object) -> None:
    with pytest.raises(UserError, match="does not fit"):
        occlude(torch.rand(1, 3, 8, 8), size=size, place=place)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["left", (1,), (-1, 0), (0.5, 0), (True, 0), None, 3])
def test_a_place_that_means_nothing(place: object) -> None:
    with pytest.raises(UserError, match="place"):
        occlude(torch.rand(1, 3, 8, 8), size=2, place=place)  # type: ignore[arg-type]

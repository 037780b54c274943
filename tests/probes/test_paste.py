"""Who is pasted into whom, and what a model that counts or looks at the centre makes of it."""

import numpy as np
import pytest
import torch
from torch import nn

import spatially
from spatially.errors import UserError
from spatially.probes import Paste


def colours(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Plain red, green or blue images: a shuffle leaves them as they are."""
    labels = np.arange(count) % 3
    return (np.eye(3, dtype=np.uint8)[labels] * 255)[:, None, None, :].repeat(32, 1).repeat(32, 2), labels


class MostPixels(nn.Module):
    num_classes = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) * 10


class CentrePixel(nn.Module):
    num_classes = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, :, 16, 16] * 10


@pytest.mark.parametrize(("model", "host_rate"), [(MostPixels(), 1.0), (CentrePixel(), 0.0)])
def test_the_counter_names_the_host_and_the_looker_the_guest(model: nn.Module, host_rate: float) -> None:
    subject = spatially.load(model, input_size=32, device="cpu")
    result = Paste(block=8).run(subject, spatially.open_images(colours(), subject), batch=13)
    assert result.host_rate.item() == host_rate
    assert result.guest_rate.item() == 1 - host_rate
    assert result.neither_rate.item() == 0
    assert result.host_rate_low <= host_rate <= result.host_rate_high
    share = np.exp(10 * 0.75) / (np.exp(10 * 0.75) + np.exp(10 * 0.25) + 1)
    if host_rate:
        assert np.allclose(result.host_probability, share, atol=1e-3)


def test_guests_are_of_another_class_and_drawn_evenly() -> None:
    subject = spatially.load(MostPixels(), input_size=32, device="cpu")
    images = spatially.open_images(colours(900), subject)
    rows = np.arange(900)
    guests = Paste().guests(images, rows)
    assert (images.labels[guests] != images.labels[rows]).all()
    counts = np.bincount(images.labels[rows] * 3 + images.labels[guests], minlength=9)
    assert counts[[1, 2, 3, 5, 6, 7]].min() > 100
    assert len(np.unique(guests)) > 500
    assert np.array_equal(Paste().guests(images, rows[::-1]), guests[::-1])


def test_one_class_is_not_enough() -> None:
    subject = spatially.load(MostPixels(), input_size=32, device="cpu")
    images = spatially.open_images(np.zeros((4, 32, 32, 3), np.uint8), subject, labels=[1] * 4)
    with pytest.raises(UserError, match="two classes"):
        Paste(block=8).run(subject, images)

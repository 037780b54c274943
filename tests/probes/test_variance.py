"""Variance over positions against NumPy, and where there is none."""

import numpy as np
import pytest
import timm
import torch

import spatially
from spatially.probes import Variance
from spatially.probes.layers import centre
from spatially.probes.variance import spatial_variance


@pytest.mark.parametrize("shape", [(3, 5, 7, 7), (2, 4, 3, 8), (1, 2, 1, 2)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_unbiased_variance_of_each_channel(shape: tuple[int, ...], offset: float) -> None:
    maps = np.random.default_rng(0).normal(offset, 2, shape)
    expected = maps.reshape(*shape[:2], -1).var(axis=2, ddof=1).mean(axis=1)
    np.testing.assert_allclose(spatial_variance(centre(torch.from_numpy(maps))).numpy(), expected, rtol=1e-12)
    single = torch.from_numpy(maps.astype(np.float32))
    rounded = single.double().numpy().reshape(*shape[:2], -1).var(axis=2, ddof=1).mean(axis=1)
    np.testing.assert_allclose(spatial_variance(centre(single)).numpy(), rounded, rtol=1e-4)
    # Channels last, as tokens are held, is the same map.
    np.testing.assert_allclose(
        spatial_variance(centre(single.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))).numpy(),
        rounded,
        rtol=1e-4,
    )


def test_layers_against_hooks() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, depth=2, img_size=64)
    subject = spatially.load(model, name="vit", device="cpu", input_size=64)
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    images = spatially.open_images(pixels, subject, labels=generator.integers(0, 4, 5))
    result = Variance().run(subject, images, batch=2)
    outputs = []
    for block in subject.model.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output[:, 1:].double()))
    with torch.no_grad():
        subject(torch.from_numpy(images.pixels.copy()) / 255)
    expected = [output.var(dim=1).mean().item() for output in outputs]
    np.testing.assert_allclose(result["variance"].values[2::2], expected, rtol=1e-5)
    spread = outputs[0].var(dim=1).mean(dim=1).std().item() / np.sqrt(5) * 2.7764451  # Student's quantile for 4
    np.testing.assert_allclose(result["variance_high"].values[2] - result["variance"].values[2], spread, rtol=1e-4)


def test_one_position_has_no_variance() -> None:
    torch.manual_seed(0)
    subject = spatially.load("resnet18", pretrained=False, num_classes=4, device="cpu", input_size=32)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    result = Variance().run(subject, spatially.open_images(pixels, subject, labels=[0, 1, 2]))
    single = (result["rows"] * result["columns"] == 1).values
    assert single.any()
    assert np.array_equal(np.isnan(result["variance"].values), single)

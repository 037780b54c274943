"""Multiplications and activations against counts by hand and against those that timm publishes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from spatially.models.costs import count_model, count_pass, known


def test_convolutions_and_linear_layers_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2),  # 14×14 from 32×32
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, groups=4),  # 12×12
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 7),
    )
    convolutions = 14 * 14 * 8 * 3 * 25 + 12 * 12 * 12 * 2 * 9
    outputs = 14 * 14 * 8 + 12 * 12 * 12 + 7
    assert count_model(model, (32, 32)) == (convolutions + 12 * 7, outputs)
    assert count_pass(model.eval(), torch.zeros(2, 3, 32, 32)) == (2 * (convolutions + 12 * 7), 2 * outputs)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_counts_both_products_fused_or_not(fused: bool) -> None:
    tokens, width, heads = 17, 192, 3
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=5).eval()
    model.blocks[0].attn.fused_attn = fused
    layers = width * (3 * width + width + 8 * width)
    macs = 16 * 768 * width + tokens * layers + 2 * tokens * tokens * width + 5 * width
    outputs = (
        16 * width + tokens * (3 * width + width + 4 * width + width) + heads * tokens * tokens + tokens * width + 5
    )
    assert count_model(model, (64, 64)) == (macs, outputs)


@pytest.mark.parametrize(
    ("name", "parameters", "macs", "activations"),
    [("resnet50", 25.557, 4.09, 11.11), ("vit_small_patch16_224", 22.05, 4.60, 11.95)],
)
def test_published_counts(name: str, parameters: float, macs: float, activations: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(parameters, abs=6e-3)
    found = count_model(model, (224, 224))
    assert found.macs / 1e9 == pytest.approx(macs, abs=6e-3)
    assert found.activations / 1e6 == pytest.approx(activations, abs=6e-3)


def test_torchvision_does_not_hide_its_attention() -> None:
    """Its fast path is one operation that nobody counts."""
    with torch.device("meta"):
        ours, theirs = timm.create_model("vit_base_patch16_224").eval(), torchvision.models.vit_b_16().eval()
    assert count_model(theirs, (224, 224)) == count_model(ours, (224, 224))
    assert torch.backends.mha.get_fastpath_enabled()


def test_models_of_the_list_are_counted_alike_once_they_have_weights() -> None:
    """Regular attention runs in tiles on a CPU, which are no part of its definition."""
    model = timm.create_model("swin_tiny_r").eval()
    assert count_model(model, (224, 224)).macs == known()["swin_tiny_r"].macs
    assert {one.device.type for one in model.parameters()} == {"cpu"}


def test_a_parameter_that_is_handed_on_from_layer_to_layer() -> None:
    """As the class token of timm's PiT is: a view of it wants a gradient, even where none is recorded."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.zeros(1, 3)), nn.Linear(3, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(self.token.expand(len(images), -1))

    assert count_model(Token(), (4, 4)) == (15, 5)


def test_a_model_that_reads_values_is_counted_for_real() -> None:
    class Curious(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert images.sum().item() == 0
            return super().forward(images.flatten(1))

    assert count_model(Curious(3 * 4 * 4, 5), (4, 4)) == (240, 5)


def test_a_model_whose_numbers_are_whole() -> None:
    """Its first buffer says nothing of the images, which stay floats."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.uint8))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert images.is_floating_point()
            assert images.sum().item() == 0
            return images.flatten(1) @ torch.zeros(48, 5)

    assert count_model(Counting(), (4, 4)) == (240, 5)

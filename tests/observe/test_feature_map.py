"""The last feature map of any model, against the method by which timm's models give theirs, and by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.observe.feature_map import feature_map
from spatially.observe.stream import stream

TOKENS = {"depth": 2, "img_size": 64, "embed_dim": 32, "num_heads": 4}
STAGES = {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
PLAIN: dict[str, Any] = {}

TIMM = {
    "vit_tiny_patch16_224": TOKENS | {"reg_tokens": 2, "num_classes": 5},
    "deit_tiny_distilled_patch16_224": TOKENS,
    "deit3_small_patch16_224": TOKENS,
    "beit_base_patch16_224": TOKENS,
    "cait_xxs24_224": TOKENS,
    "xcit_nano_12_p16_224": {"depth": 2, "embed_dim": 32, "num_heads": 4},
    "vit_relpos_small_patch16_224": TOKENS,
    "vit_base_patch16_siglip_224": TOKENS,
    "swin_tiny_patch4_window7_224": STAGES,
    "swinv2_tiny_window8_256": STAGES,
    "levit_128s": {"img_size": 64, "embed_dim": (32, 32), "num_heads": (2, 2), "depth": (1, 1), "key_dim": 16},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "resnet10t": PLAIN,
    "efficientnet_lite0": PLAIN,
    "mobilenetv3_small_050": PLAIN,
    "regnetx_002": PLAIN,
    "densenet121": {"growth_rate": 4, "block_config": (1, 1)},
    "hgnetv2_b0": PLAIN,  # its last stage adds nothing
    "ese_vovnet19b_slim": PLAIN,
    "rdnet_tiny": PLAIN,
    "fastvit_t8": PLAIN,
    "tf_efficientnet_cc_b0_4e": PLAIN,  # images as groups of channels
    "resmlp_12_224": {"img_size": 64},
    "vit_small_relposmlp_gab": TOKENS,
    "vit_small_conv3": TOKENS,
    "swin_tiny_m": {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)},
}


def subject_of(model: nn.Module, size: int | tuple[int, int] = 64) -> spatially.Subject:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing that equals something else by having done nothing
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return spatially.load(model, name="model", input_size=size, device="cpu")


def seen(subject: spatially.Subject, images: Tensor, **options: Any) -> Tensor:
    look = feature_map(subject, **options)
    with torch.no_grad(), look:
        subject(images)
    ((_, map),) = look
    return map


def as_map(features: Tensor, grid: tuple[int, int]) -> Tensor:
    if features.ndim == 3:
        return features[:, features.shape[1] - grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)
    return features if tuple(features.shape[2:]) == grid else features.permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", list(TIMM))
def test_what_timm_calls_the_features(name: str) -> None:
    subject = subject_of(timm.create_model(name, **{"num_classes": 5} | TIMM[name]))
    images = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        features = subject.model.forward_features(subject.normalise(images))
    features = features[0] if isinstance(features, tuple) else features
    map = seen(subject, images)
    assert torch.equal(map, as_map(features, feature_map(subject).place().grid))


def transformer(family: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = getattr(transformers, f"{family}Config")(num_labels=5, **options)
    return getattr(transformers, f"{family}ForImageClassification")(config)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
}
# A model, and the module whose output the last map is.
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torchvision resnet": (lambda: torchvision.models.resnet18(num_classes=5), "layer4"),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=5),
        "encoder.ln",
    ),
    "torchvision swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=5),
        "norm",
    ),
    "torchvision googlenet": (lambda: torchvision.models.googlenet(num_classes=5, init_weights=False), "inception5b"),
    "torchvision efficientnet": (lambda: torchvision.models.mobilenet_v3_small(num_classes=5), "features"),
    "hf vit": (lambda: transformer("ViT", **SMALL), "vit.layernorm"),
    "hf dinov2": (lambda: transformer("Dinov2", **SMALL), "dinov2.layernorm"),
    "hf swin": (
        lambda: transformer("Swin", image_size=64, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
        "swin.layernorm",
    ),
    "hf hiera": (
        lambda: transformer("Hiera", image_size=[64, 64], embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2]),
        "hiera.encoder.stages.3.layers.0",
    ),
    "hf mobilevitv2": (
        lambda: transformer("MobileViTV2", image_size=64, width_multiplier=0.5, n_attn_blocks=[1, 1, 1]),
        "mobilevitv2.encoder.layer.4.conv_projection",
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_libraries(name: str) -> None:
    build, path = OTHERS[name]
    subject = subject_of(build())
    images = torch.rand(3, 3, 64, 64)
    kept: list[Tensor] = []
    handle = subject.model.get_submodule(path).register_forward_hook(
        lambda module, inputs, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    map = seen(subject, images)
    handle.remove()
    grid = feature_map(subject).place().grid
    last = [output for output in kept if len(output) == len(images)][-1]
    torch.testing.assert_close(map, as_map(last, grid))


def test_a_home_made_model_without_additions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    subject = subject_of(model, 32)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(seen(subject, images), model[1](model[0](subject.normalise(images))).detach())


def test_a_convolution_that_answers_everywhere_is_no_feature_map() -> None:
    features = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.ReLU())
    model = nn.Sequential(features, nn.Conv2d(8, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    subject = subject_of(model, 32)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(seen(subject, images), features(subject.normalise(images)).detach())


class Later(nn.Module):
    """Convolutions without a short cut after the only one with one; `dense` answers at every position."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, stride=2, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.dense = dense

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x).relu()
        return self.down[1](self.down[0](x).relu()).relu()

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(x.permute(0, 2, 3, 1)).mean((1, 2)) if self.dense else self.head(x.mean((2, 3)))


@pytest.mark.parametrize("dense", [False, True])
def test_convolutions_after_the_last_addition(dense: bool) -> None:
    model = Later(dense)
    subject = subject_of(model, 32)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(seen(subject, images), model.features(subject.normalise(images)).detach())
    assert feature_map(subject).place().grid == (8, 8)


def test_vectors_times_matrices_of_their_own_place() -> None:
    torch.manual_seed(0)
    subject = spatially.load(timm.create_model("lambda_resnet26t", num_classes=5), input_size=64, device="cpu")
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = subject.model.forward_features(subject.normalise(images))
    assert torch.equal(seen(subject, images), features)
    assert len(stream(subject).places()) == 9  # the stem, and eight blocks


def test_a_last_map_that_cannot_be_followed_is_not_replaced_by_an_earlier_one() -> None:
    class Filtered(Later):
        def features(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.block(x).relu()
            return self.down[0](torch.fft.irfft2(torch.fft.rfft2(x)))

    subject = subject_of(Filtered(), 32)
    with pytest.raises(NotApplicable, match=r"where in the image down\.0's output lies cannot be told"):
        feature_map(subject).place()
    with pytest.raises(NotApplicable, match=r"where in the image down\.0's output lies cannot be told"):
        stream(subject).places()
    assert feature_map(subject, layer=0).place().name == "stem"


def test_maps_a_pixel_apart_beside_each_other() -> None:
    """As in NASNet, whose short cuts halve a map twice, the second time shifted by a pixel."""

    class Joined(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self.features(x).mean((2, 3)))

        def features(self, x: Tensor) -> Tensor:
            return torch.cat([self[0](x), self[1](x[:, :, 1:, 1:])], 1).relu()

    model = Joined(nn.Conv2d(3, 4, 1, stride=2), nn.Conv2d(3, 4, 1, stride=2), nn.Linear(8, 4))
    subject = subject_of(model, 8)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(seen(subject, images), model.features(subject.normalise(images)).detach())
    assert feature_map(subject).source(1, 1) == (3, 3)


def test_points_of_the_stream_by_name_and_number() -> None:
    subject = subject_of(timm.create_model("vit_tiny_patch16_224", num_classes=5, **TOKENS))
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(seen(subject, images, layer="blocks.0.mlp"), seen(subject, images, layer=2))
    assert torch.equal(seen(subject, images, layer=-1), seen(subject, images, layer="blocks.1.mlp"))
    with torch.no_grad():
        final = subject.model.norm(seen(subject, images, layer=-1).flatten(2).transpose(1, 2))
    torch.testing.assert_close(as_map(final, (4, 4)), seen(subject, images))
    with pytest.raises(UserError, match="did you mean"):
        seen(subject, images, layer="blocks.1.mpl")


def test_where_positions_come_from() -> None:
    """A patch from its middle; strided convolutions from the pixels they are centred on."""
    vit = subject_of(timm.create_model("vit_tiny_patch16_224", num_classes=5, **TOKENS))
    assert feature_map(vit).source(1, 2) == (24, 40)
    resnet = subject_of(torchvision.models.resnet18(num_classes=5), 224)
    assert feature_map(resnet).source(3, 3) == (96.5, 96.5)


def test_what_was_found_at_one_size_is_not_taken_for_another() -> None:
    subject = subject_of(timm.create_model("resnet18"), 64)
    found = feature_map(subject).found()
    shapes = []
    with torch.no_grad(), feature_map(subject, lambda place, map: shapes.append(map.shape[2:]), found=found):
        for side in (64, 96):
            subject(torch.rand(1, 3, side, side))
    assert shapes == [(2, 2), (3, 3)]


def test_rectangles_and_gradients() -> None:
    subject = subject_of(timm.create_model("resnet10t", num_classes=5), (64, 96))
    assert feature_map(subject).place().grid == (2, 3)
    look = feature_map(subject)
    images = torch.rand(2, 3, 64, 96, requires_grad=True)
    with look:
        subject(images)
    ((_, map),) = look
    (gradient,) = torch.autograd.grad(map[0].sum(), images)
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0

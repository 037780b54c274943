"""Positions of small networks of every library, against what the networks themselves add to their logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor, nn

import spatially
from spatially.errors import UserError
from spatially.observe.position import Position, centre, grid_of_tokens
from spatially.observe.positions import positions
from spatially.surgery import add_gaussian_bias

COLUMN = {"depth": 2, "img_size": 64, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 5,
}


def subject_of(model: nn.Module, size: int | tuple[int, int] = 64) -> spatially.Subject:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return spatially.load(model, name="model", input_size=size, device="cpu")


def hugging_face(family: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = getattr(transformers, f"{family}Config")(attn_implementation="eager", **options)
    return getattr(transformers, f"{family}ForImageClassification")(config)


def pairs(found: Position) -> np.ndarray:
    """(heads, queries, keys)."""
    bias = found.bias().values
    heads, down, across = bias.shape[:3]
    return bias.reshape(heads, down * across, -1)


# A network, its size, where a layer's bias is, and how that layer itself computes it: (heads, queries, keys).
BIASES: dict[str, tuple[Callable[[], nn.Module], int, str, Callable[[Any], Tensor]]] = {
    "timm swin": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(1, 1), num_heads=(2, 4)
        ),
        56,
        "layers.1.blocks.0.attn",
        lambda layer: layer._get_rel_pos_bias()[0],
    ),
    "timm swin v2": (
        lambda: timm.create_model(
            "swinv2_tiny_window8_256", img_size=64, embed_dim=16, depths=(1, 1), num_heads=(2, 4)
        ),
        64,
        "layers.0.blocks.0.attn",
        lambda layer: (
            16
            * torch.sigmoid(layer.cpb_mlp(layer.relative_coords_table).view(-1, layer.num_heads))[
                layer.relative_position_index.view(-1)
            ]
            .view(64, 64, -1)
            .permute(2, 0, 1)
        ),
    ),
    "timm swin v2 cr": (
        lambda: timm.create_model(
            "swinv2_cr_tiny_224", img_size=64, window_size=(4, 4), embed_dim=16, depths=(1,), num_heads=(2,)
        ),
        64,
        "stages.0.blocks.0.attn",
        lambda layer: layer._relative_positional_encodings()[0],
    ),
    "timm relpos mlp": (
        lambda: timm.create_model("vit_relpos_small_patch16_224", **COLUMN),
        64,
        "blocks.1.attn.rel_pos",
        lambda layer: layer.get_bias()[0],
    ),
    "timm relpos table": (
        lambda: timm.create_model("vit_relpos_small_patch16_224", rel_pos_type="bias", class_token=True, **COLUMN),
        64,
        "blocks.1.attn.rel_pos",
        lambda layer: layer.get_bias()[0, :, 1:, 1:],
    ),
    "timm beit": (
        lambda: timm.create_model("beit_base_patch16_224", **COLUMN),
        64,
        "blocks.0.attn",
        lambda layer: layer._get_rel_pos_bias()[0, :, 1:, 1:],
    ),
    "timm maxvit, TensorFlow's": (
        lambda: timm.create_model("maxvit_tiny_tf_224", img_size=64, depths=(1,), embed_dim=(32,), stem_width=16),
        64,
        "stages.0.blocks.0.attn_block.attn.rel_pos",
        lambda layer: layer.get_bias(),
    ),
    "timm levit": (
        lambda: timm.create_model(
            "levit_128s", img_size=64, embed_dim=(32, 32), num_heads=(2, 2), depth=(1, 1), key_dim=16
        ),
        64,
        "stages.1.downsample.attn_downsample",
        lambda layer: layer.attention_biases[:, layer.attention_bias_idxs],
    ),
    "torchvision swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [7, 7], num_classes=5),
        56,
        "features.1.0.attn",
        lambda layer: layer.get_relative_position_bias()[0],
    ),
    "torchvision swin v2": (
        lambda: torchvision.models.SwinTransformer(
            [4, 4],
            16,
            [1, 1],
            [2, 4],
            [8, 8],
            num_classes=5,
            block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
        ),
        64,
        "features.3.0.attn",
        lambda layer: layer.get_relative_position_bias()[0],
    ),
    "hf swin": (
        lambda: hugging_face(
            "Swin", image_size=56, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=7, num_labels=5
        ),
        56,
        "swin.encoder.layers.0.blocks.0.attention.relative_position_bias",
        lambda layer: layer()[0] if layer().ndim == 4 else layer(),
    ),
    "hf beit": (
        lambda: hugging_face("Beit", use_relative_position_bias=True, **TOKENS),
        64,
        "beit.layers.0.relative_position_bias",
        lambda layer: layer((4, 4)).squeeze(0)[:, 1:, 1:],
    ),
    "own relpos mlp": (
        lambda: timm.create_model("vit_small_relposmlp", **COLUMN),
        64,
        "blocks.1.attn.rel_pos",
        lambda layer: layer((4, 4)),
    ),
    "own relpos table": (
        lambda: timm.create_model("vit_small_relposbias", **COLUMN),
        64,
        "blocks.1.attn.rel_pos",
        lambda layer: layer((4, 4)),
    ),
    "own swin": (
        lambda: timm.create_model(
            "swin_tiny", img_size=56, embed_dim=16, depths=(1, 1), num_heads=(2, 4), num_classes=5
        ),
        56,
        "layers.1.blocks.0.attn",
        lambda layer: layer.bias(),
    ),
}


@pytest.mark.parametrize("name", list(BIASES))
def test_bias_is_what_the_layer_adds(name: str) -> None:
    build, size, path, own = BIASES[name]
    subject = subject_of(build(), size)
    found = {one.name: one for one in positions(subject) if one.is_bias}
    match = [key for key in found if key == path or path.endswith(key) or key.endswith(path)]
    assert match, f"{path} is not among {list(found)}"
    with torch.no_grad():
        expected = own(subject.model.get_submodule(match[0])).numpy()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(pairs(found[match[0]]), expected, atol=1e-5)
    one = found[match[0]]
    query = (one.grid[0] - 1, 0)
    np.testing.assert_allclose(
        one.bias(query).values.reshape(len(expected), -1), expected[:, query[0] * one.grid[1] + query[1]], atol=1e-5
    )


def test_alternet_s_table_is_key_minus_query() -> None:
    subject = subject_of(timm.create_model("alternet_18", num_classes=5), 64)
    found = next(one for one in positions(subject) if one.is_bias)
    table = subject.model.get_submodule(found.name).position_table.detach().numpy()
    bias = found.bias((2, 3)).values
    assert bias.shape == (1, 7, 7)
    assert bias[0, 5, 1] == pytest.approx(table[5 - 2 + 6, 1 - 3 + 6])


EMBEDDINGS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, int], int]] = {
    "timm vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", reg_tokens=2, **COLUMN),
        "pos_embed",
        (4, 4),
        3,
    ),
    "timm deit distilled": (
        lambda: timm.create_model("deit_tiny_distilled_patch16_224", **COLUMN),
        "pos_embed",
        (4, 4),
        2,
    ),
    "timm cait": (lambda: timm.create_model("cait_xxs24_224", **COLUMN), "pos_embed", (4, 4), 0),
    "timm pit": (
        lambda: timm.create_model(
            "pit_ti_224", base_dims=(8, 8), heads=(2, 4), depth=(1, 1), img_size=64, num_classes=5
        ),
        "pos_embed",
        (7, 7),
        0,
    ),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=5),
        "encoder.pos_embedding",
        (4, 4),
        1,
    ),
    "hf vit": (lambda: hugging_face("ViT", **TOKENS), "vit.embeddings.position_embeddings", (4, 4), 1),
    "hf deit": (lambda: hugging_face("DeiT", **TOKENS), "deit.embeddings.position_embeddings", (4, 4), 2),
    "hf dinov2": (lambda: hugging_face("Dinov2", **TOKENS), "dinov2.embeddings.position_embeddings", (4, 4), 1),
    "own conv": (lambda: timm.create_model("vit_small_conv3", **COLUMN), "pos_embed", (4, 4), 0),
}


@pytest.mark.parametrize("name", list(EMBEDDINGS))
def test_embeddings_by_row_and_column(name: str) -> None:
    build, path, grid, prefix = EMBEDDINGS[name]
    subject = subject_of(build())
    (found,) = [one for one in positions(subject) if one.kind == "absolute"]
    assert (found.name, found.grid) == (path, grid)
    raw = subject.model.get_parameter(path).detach()
    tokens = raw[0].flatten(1).T if raw.ndim == 4 else raw[0]
    assert found.arrays["embedding"].dims == ("y", "x", "channel")
    np.testing.assert_array_equal(found.arrays["embedding"].values[1, 2], tokens[prefix + grid[1] + 2].numpy())
    assert found.arrays["prefix"].sizes["token"] == prefix if prefix else "prefix" not in found.arrays
    similarity = found.similarity((1, 2))
    expected = torch.cosine_similarity(tokens[prefix:], tokens[prefix + grid[1] + 2][None]).unflatten(0, grid)
    np.testing.assert_allclose(similarity.values, expected.numpy(), atol=1e-5)


def test_embedding_of_a_rectangle() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **COLUMN | {"img_size": (32, 80)})
    (found,) = positions(subject_of(model, (32, 80)))
    assert found.grid == (2, 5)


def test_a_computed_embedding_is_read_while_an_image_passes() -> None:
    model = timm.create_model("xcit_nano_12_p16_224", depth=2, embed_dim=32, num_heads=4, num_classes=5)
    subject = subject_of(model)
    (found,) = positions(subject)
    expected = subject.model.pos_embed(1, 4, 4)[0].detach().permute(1, 2, 0).numpy()
    assert (found.name, found.kind) == ("pos_embed", "absolute")
    np.testing.assert_allclose(found.arrays["embedding"].values, expected, atol=1e-6)


def test_what_a_block_computes_from_the_image_is_no_embedding() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Conv2d(3, 8, 16, stride=16)
            self.head = nn.Linear(8, 4)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.pos_embed(images).mean((2, 3)))

    assert positions(subject_of(Positions())) == []


def test_fixed_embeddings_are_told_from_learned_ones() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **COLUMN)
    wrapped = nn.Sequential(nn.Identity())
    wrapped.register_buffer("positional_encoding", torch.randn(1, 16, 8))
    wrapped.append(model)
    kinds = {one.name: one.kind for one in positions(wrapped)}
    assert kinds == {"1.pos_embed": "absolute", "positional_encoding": "sinusoidal"}


def test_rotary_positions_are_reported_as_such() -> None:
    model = timm.create_model("eva02_tiny_patch14_224", **COLUMN | {"img_size": 56})
    found = {one.kind: one for one in positions(subject_of(model, 56))}
    assert set(found) == {"absolute", "rotary"}
    assert found["rotary"].grid == (4, 4)
    with pytest.raises(UserError, match="adds no bias"):
        found["rotary"].bias((0, 0))


def test_decomposed_positions_are_reported_as_such() -> None:
    shape = MultiScaleVitCfg(
        depths=(1, 1), embed_dim=(32, 64), num_heads=(1, 2), stride_q=((1, 1), (2, 2)), stride_kv=((4, 4), (2, 2))
    )
    model = MultiScaleVit(shape, img_size=64, num_classes=5)
    found = positions(subject_of(model))
    assert {one.kind for one in found} == {"decomposed"}
    assert all(set(one.arrays) == {"down", "across"} for one in found)
    bottleneck = positions(subject_of(timm.create_model("botnet26t_256", num_classes=5), 256))
    assert [(one.kind, *one.arrays) for one in bottleneck] == [("decomposed", "down", "across")] * 3


def test_tokens_of_blocks_and_tables_of_offsets_are_no_maps() -> None:
    nested = positions(subject_of(timm.create_model("nest_tiny", num_classes=5), 224))
    assert [one.grid for one in nested] == [None, None, (14, 14)]
    assert [(*one.arrays,) for one in nested] == [("vectors",), ("vectors",), ("embedding",)]
    offsets = timm.create_model("lambda_resnet26rpt_256", num_classes=5)
    assert positions(subject_of(offsets, 256)) == []


@pytest.mark.parametrize(
    ("name", "grids"),
    [
        ("visformer_tiny", {"pos_embed1": (28, 28), "pos_embed2": (14, 14), "pos_embed3": (7, 7)}),
        ("tnt_s_patch16_224", {"patch_pos": (14, 14), "pixel_pos": (4, 4)}),
    ],
)
def test_embeddings_by_other_names(name: str, grids: dict[str, tuple[int, int]]) -> None:
    found = positions(subject_of(timm.create_model(name, num_classes=5), 224))
    assert {one.name: one.grid for one in found} == grids


@pytest.mark.parametrize("name", ["timm vit", "timm relpos mlp", "torchvision swin", "own relpos mlp"])
def test_gaussian_biases_stand_beside_what_the_layer_has(name: str) -> None:
    build, size = (EMBEDDINGS[name][0], 64) if name in EMBEDDINGS else BIASES[name][:2]
    subject = subject_of(build(), size)
    before = [one for one in positions(subject) if one.is_bias]
    add_gaussian_bias(subject.model, amplitude=2.0, sigma=3.0)
    found = [one for one in positions(subject) if one.kind == "gaussian"]
    assert len(found) == len(before) if before else len(found) == 2
    for number, one in enumerate(found):
        assert one.layer == number
        assert one.bias((0, 0)).values[0, 1, 2] == pytest.approx(4 * np.exp(-5 / 18), rel=1e-5)
        assert one.arrays["sigma"].values.tolist() == [3.0]


def test_looking_changes_nothing() -> None:
    subject = subject_of(BIASES["own relpos mlp"][0]())
    images = torch.rand(2, 3, 64, 64)
    before, state = subject(images), {name: value.clone() for name, value in subject.model.state_dict().items()}
    positions(subject)
    assert torch.equal(subject(images), before)
    assert all(torch.equal(value, state[name]) for name, value in subject.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())


def test_a_model_without_positions_has_none() -> None:
    assert positions(subject_of(timm.create_model("resnet10t", num_classes=5))) == []


def test_places_outside_the_grid_are_named() -> None:
    found = next(one for one in positions(subject_of(BIASES["timm beit"][0]())) if one.is_bias)
    with pytest.raises(UserError, match=r"query \(4, 0\) lies outside the grid: rows go from 0 to 3, columns to 3"):
        found.bias((4, 0))
    with pytest.raises(UserError, match="a row and a column"):
        found.bias((1.5, 0))  # type: ignore[arg-type]


def test_grids_of_tokens() -> None:
    assert grid_of_tokens(198, (224, 224)) == (2, (14, 14))
    assert grid_of_tokens(10, (32, 80)) == (0, (2, 5))
    assert grid_of_tokens(2) is None
    assert [centre(grid) for grid in ((14, 14), (7, 7), (1, 1), (2, 5))] == [(6, 6), (3, 3), (0, 0), (0, 2)]

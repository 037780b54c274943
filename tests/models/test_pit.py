"""PiT against timm's, the paper's table, and its dense form."""

import pytest
import timm
import torch
from timm.models.pit import PoolingVisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spatially.errors import UserError
from spatially.models.pit import PoolingTransformer, checkpoint_filter

SMALL = {"dims": (12, 24, 48), "heads": (2, 4, 8), "depths": (1, 2, 1), "img_size": 64, "num_classes": 5}


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> PoolingTransformer:
    torch.manual_seed(0)
    return PoolingTransformer(**(SMALL | changes)).eval()  # type: ignore[arg-type]


def peer(distilled: bool) -> PoolingVisionTransformer:
    model = PoolingVisionTransformer(
        img_size=64, base_dims=[6, 6, 6], depth=[1, 2, 1], heads=[2, 4, 8], num_classes=5, distilled=distilled
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "parameters", "distilled", "gmacs", "strides"),
    [
        ("tiny", 4_847_272, 5_104_336, 0.70, [8, 16, 32]),
        ("xsmall", 10_618_888, 11_003_984, 1.40, [8, 16, 32]),
        ("small", 23_461_912, 24_039_056, 2.87, [8, 16, 32]),
        ("base", 73_764_840, 74_790_096, 12.4, [7, 14, 28]),
    ],
)
def test_table(name: str, parameters: int, distilled: int, gmacs: float, strides: list[int]) -> None:
    model = timm.create_model(f"pit_{name}", device="meta").eval()
    both = timm.create_model(f"pit_{name}_distilled", device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in both.parameters()) == distilled
    with FlopCounterMode(display=False) as count, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, 3, 224, 224, device="meta"))
    assert count.get_total_flops() / 2e9 == pytest.approx(gmacs, rel=0.01)
    assert [info["reduction"] for info in model.feature_info] == strides


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("authors", [False, True])
def test_equals_timm(distilled: bool, authors: bool) -> None:
    theirs, ours = peer(distilled), small(distilled=distilled)
    weights = theirs.state_dict()
    if authors:
        names = {
            name: name.replace("transformers.1.pool", "pools.0").replace("transformers.2.pool", "pools.1")
            for name in weights
        }
        weights = {"state_dict": {names[name]: value for name, value in weights.items()}}
    ours.load_state_dict(checkpoint_filter(weights, ours))
    torch.testing.assert_close(ours(images(64, 64)), theirs(images(64, 64)), atol=1e-5, rtol=0)
    prefix = ours.forward_features(images(64, 64))[:, : ours.num_prefix_tokens]
    torch.testing.assert_close(prefix, theirs.forward_features(images(64, 64)), atol=1e-5, rtol=0)
    _, maps = theirs.forward_intermediates(images(64, 64))
    torch.testing.assert_close(
        ours.forward_intermediates(images(64, 64), intermediates_only=True), maps, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("size", [(96, 96), (64, 104), (71, 133), (16, 40)])
def test_other_sizes_resize_the_positions(size: tuple[int, int]) -> None:
    other = small()
    built = small(img_size=size)
    built.load_state_dict(checkpoint_filter(other.state_dict(), built))
    torch.testing.assert_close(other(images(*size)), built(images(*size)))
    grid = tuple((side - 16) // 8 + 1 for side in size)
    expected = F.interpolate(other.pos_embed, size=grid, mode="bicubic", antialias=True)
    torch.testing.assert_close(built.pos_embed, expected, atol=1e-6, rtol=0)


def test_distilled_training() -> None:
    model = small(distilled=True)
    tokens = model.forward_features(images(64, 64))
    first, last = model.head(tokens[:, 0]), model.head_dist(tokens[:, 1])
    torch.testing.assert_close(model(images(64, 64)), (first + last) / 2)
    model.set_distilled_training()
    assert isinstance(model(images(64, 64)), Tensor)
    torch.testing.assert_close(model.train()(images(64, 64)), (first, last))
    model.set_distilled_training(False)
    assert isinstance(model(images(64, 64)), Tensor)
    with pytest.raises(UserError, match="distilled=True"):
        small().set_distilled_training()


@pytest.mark.parametrize(("output_stride", "every"), [(16, (1, 1, 2)), (8, (1, 2, 4))])
def test_dense_maps_hold_the_strided_ones(output_stride: int, every: tuple[int, ...]) -> None:
    """Where attention and MLP add nothing, all that a map holds has come through the pools."""
    strided, dense = small(), small(output_stride=output_stride)
    dense.load_state_dict(strided.state_dict())
    for model in (strided, dense):
        for name, parameter in model.named_parameters():
            if ".proj." in name or ".fc2." in name:
                nn.init.zeros_(parameter)
    assert [info["reduction"] for info in dense.feature_info] == [min(output_stride, 8 * 2**i) for i in range(3)]
    finer = dense.forward_intermediates(images(80, 101), intermediates_only=True)
    coarser = strided.forward_intermediates(images(80, 101), intermediates_only=True)
    for fine, coarse, step in zip(finer, coarser, every, strict=True):
        torch.testing.assert_close(fine[..., ::step, ::step], coarse)
    torch.testing.assert_close(dense(images(80, 101)), strided(images(80, 101)))


def test_features() -> None:
    model = small()
    tokens, maps = model.forward_intermediates(images(72, 56), norm=True)
    assert [tuple(one.shape) for one in maps] == [(2, 12, 8, 6), (2, 24, 4, 3), (2, 48, 2, 2)]
    torch.testing.assert_close(maps[-1].flatten(2).mT, tokens[:, 1:])
    torch.testing.assert_close(tokens, model.forward_features(images(72, 56)))
    early, last = model.forward_intermediates(images(72, 56), indices=[1], stop_early=True)
    torch.testing.assert_close(last, [maps[1]])
    assert early.shape == (2, 13, 24)
    features = timm.create_model("pit_tiny", features_only=True, output_stride=16, out_indices=(1, 2))
    assert [one.shape[-1] for one in features(images(64, 64))] == [4, 4]
    assert features.feature_info.reduction() == [16, 16]


def test_checkpointing_changes_nothing() -> None:
    gradients = []
    for enable in (False, True):
        model = small(drop_path_rate=0.3, proj_drop_rate=0.1).train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        model(images(64, 64)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_new_classifier() -> None:
    model = small(distilled=True).double()
    model.reset_classifier(0)
    assert model(images(64, 64).double()).shape == (2, 48)
    model.reset_classifier(3)
    assert model(images(64, 64).double()).dtype == torch.float64
    assert [(layer.out_features, layer.training) for layer in model.get_classifier()] == [(3, False)] * 2


def test_layers_for_decay() -> None:
    model = small()
    layers = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert layers["pos_embed"] == layers["cls_token"] == layers["patch_embed.conv.weight"] == 0
    assert layers["transformers.1.pool.conv.weight"] == layers["transformers.1.blocks.0.attn.qkv.weight"] == 2
    assert layers["norm.weight"] == layers["transformers.2.blocks.0.mlp.fc1.bias"] == 4
    assert layers["head.weight"] == 5
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 8}, "img_size"),
        ({"output_stride": 4}, "output_stride must be one of 8, 16, 32"),
        ({"heads": (2, 4)}, "one entry a stage"),
        ({"heads": (5, 4, 8)}, "multiples of heads"),
        ({"pool": False}, "pool=False"),
        ({"weight_init": "xavier"}, "weight_init"),
        ({"global_pool": "avg"}, "global_pool"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)


def test_images_that_are_no_images() -> None:
    with pytest.raises(UserError, match="at least 16"):
        small()(images(15, 64))
    with pytest.raises(UserError, match=r"\(batch, 3, height, width\)"):
        small()(images(64, 64)[:, :1])


@pytest.mark.parametrize("prune_head", [False, True])
def test_a_pruned_model_still_runs(prune_head: bool) -> None:
    model, given = small(), images(64, 64)
    tokens, _ = model.forward_intermediates(given, indices=[0], stop_early=True)
    model.prune_intermediate_layers([0], prune_head=prune_head)
    torch.testing.assert_close(model(given), tokens)
    torch.testing.assert_close(model.forward_features(given), tokens)

"""The Swin family: counts, equality with timm's Swin, what loads into what, and what moves with the image."""

import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay
from torch import nn

from spatially.errors import UserError
from spatially.models.registry import CARDS
from spatially.models.swin import SIZES, SwinTransformer, checkpoint_filter

SMALL = {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "num_classes": 5}
ENDINGS = [
    "",
    "_r",
    "_m",
    "_m_dw",
    "_gab",
    *(f"_{part}{kind}" for part in ("query", "key", "value") for kind in ("", "_dw")),
]


def small(name: str = "swin_tiny", **options: object) -> SwinTransformer:
    return timm.create_model(name, **{**SMALL, **options}).eval()


def randomise(model: nn.Module) -> nn.Module:
    """Weights under which every part matters: biases and tables too."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name and name.endswith("weight")), std=0.3)
    return model.eval()


def peer(**options: object) -> nn.Module:
    return randomise(timm.create_model("swin_tiny_patch4_window7_224", **{**SMALL, **options}))


def loaded(name: str, state: dict, **options: object) -> SwinTransformer:
    model = small(name, **options)
    model.load_state_dict(checkpoint_filter(state, model))
    return model


def original_names(state: dict) -> dict:
    """As Liu et al. wrote them: merging at the end of a stage, a bare head, buffers among the weights."""
    renamed = {}
    for name, value in state.items():
        for stage in (1, 2, 3):
            name = name.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.downsample!")
        renamed[name.replace("!", "").replace("head.fc.", "head.")] = value
    return {"model": renamed | {"layers.0.blocks.1.attn_mask": torch.zeros(1)}}


def test_every_name_is_registered() -> None:
    for size in SIZES:
        for ending in ENDINGS:
            assert CARDS[f"swin_{size}{ending}"].paper == ("kim" if ending == "_gab" else "xu")


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("swin_tiny", {}, 28_288_354),
        ("swin_tiny", {"position_table": False}, 28_265_032),
        ("swin_tiny_r", {}, 28_265_032),
        *[(f"swin_tiny_{part}", {}, 45_517_384) for part in ("query", "key", "value", "m")],
        *[(f"swin_tiny_{part}_dw", {}, 26_148_232) for part in ("query", "key", "value", "m")],
        ("swin_tiny_gab", {}, 28_288_354 + 2 * 12),
        ("swin_tiny_gab", {"per_head": True}, 28_288_354 + 2 * (2 * 3 + 2 * 6 + 6 * 12 + 2 * 24)),
        ("swin_small", {}, 49_606_258),
        ("swin_base", {}, 87_768_224),
    ],
)
def test_parameters(name: str, options: dict, count: int) -> None:
    model = timm.create_model(name, device=torch.device("meta"), **options)
    assert sum(weight.numel() for weight in model.parameters()) == count


@pytest.mark.parametrize(
    ("built", "given", "options"),
    [
        (224, (224, 224), {}),
        ((160, 192), (160, 192), {}),  # grids that are no whole windows, and a last stage of one window
        (224, (160, 192), {"strict_img_size": False}),
        (224, (100, 132), {"strict_img_size": False}),  # odd grids
        ((64, 320), (96, 72), {"strict_img_size": False}),
        (224, (224, 224), {"window_size": 8}),
    ],
)
def test_equals_timm(built: int | tuple[int, int], given: tuple[int, int], options: dict) -> None:
    deep = {"embed_dim": 12, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "img_size": built}
    theirs = peer(**deep, **options)
    options.pop("strict_img_size", None)
    images = torch.randn(2, 3, *given)
    for state in (theirs.state_dict(), original_names(theirs.state_dict())):
        ours = loaded("swin_tiny", state, **deep, **options)
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)


def test_gradients_equal_timm_s() -> None:
    theirs = peer(img_size=96)
    ours = loaded("swin_tiny", theirs.state_dict(), img_size=96)
    images = torch.randn(2, 3, 96, 96)
    for model in (ours, theirs):
        model(images).square().sum().backward()
    reference = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, reference[name].grad, atol=1e-4, rtol=1e-4, msg=name)


def test_gaussian_of_amplitude_0_is_plain() -> None:
    plain = peer(img_size=64)
    ours = loaded("swin_tiny_gab", plain.state_dict(), img_size=64)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert not torch.allclose(ours(images), plain(images), atol=1e-3)  # it starts at A = 1
        for name, weight in ours.named_parameters():
            if name.endswith("amplitude"):
                weight.zero_()
        torch.testing.assert_close(ours(images), plain(images), atol=1e-5, rtol=1e-5)


def test_gaussian_in_regular_fields() -> None:
    plain = randomise(small("swin_tiny_r"))
    ours = loaded("swin_tiny_r", plain.state_dict(), gaussian_bias=True)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert not torch.allclose(ours(images), plain(images), atol=1e-3)
        for name, weight in ours.named_parameters():
            if name.endswith("amplitude"):
                weight.zero_()
        torch.testing.assert_close(ours(images), plain(images))


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_plain_weights_keep_their_function_in_a_dense_convolution(part: str) -> None:
    plain = randomise(small(position_table=False, img_size=72))
    ours = loaded(f"swin_tiny_{part}", plain.state_dict(), img_size=72)
    images = torch.randn(2, 3, 72, 88)  # filled up to whole windows
    torch.testing.assert_close(ours(images), plain(images), atol=1e-5, rtol=1e-5)


def test_plain_weights_in_regular_fields() -> None:
    """The table goes, the rest stays; with the key convolved the function is the same."""
    state = peer().state_dict()
    regular, convolved = loaded("swin_tiny_r", state), loaded("swin_tiny_m", state)
    images = torch.randn(1, 3, 64, 48)
    torch.testing.assert_close(convolved(images), regular(images), atol=1e-5, rtol=1e-5)


def test_a_depthwise_convolution_says_what_it_could_not_take() -> None:
    model = small("swin_tiny_key_dw")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = peer().state_dict()
    with pytest.warns(UserWarning, match=r"layers\.0\.blocks\.0\.attn\.qkv\.key\.weight"):
        model.load_state_dict(checkpoint_filter(state, model))
    after = model.state_dict()
    name = "layers.1.blocks.0.attn.qkv"
    for kind in ("weight", "bias"):
        assert torch.equal(after[f"{name}.key.{kind}"], before[f"{name}.key.{kind}"])
        query, _, value = state[f"{name}.{kind}"].chunk(3)
        assert torch.equal(after[f"{name}.linear.{kind}"], torch.cat([query, value]))


@pytest.mark.parametrize("ending", ENDINGS)
def test_own_weights_load_as_they_are(ending: str) -> None:
    model = small(f"swin_tiny{ending}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filtered = checkpoint_filter(model.state_dict(), small(f"swin_tiny{ending}"))
    assert filtered.keys() == model.state_dict().keys()
    assert all(torch.equal(value, filtered[name]) for name, value in model.state_dict().items())


def test_weights_of_another_convolution_are_refused() -> None:
    query = small("swin_tiny_query")
    with pytest.raises(RuntimeError, match=r"qkv\.query\.weight"):
        query.load_state_dict(checkpoint_filter(small("swin_tiny_key").state_dict(), query))


def test_tables_of_another_window_are_resized() -> None:
    """A table that grows with the offset downwards keeps its zero, its order and its ends."""
    plain = small(window_size=7)
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    state = plain.state_dict()
    state[name] = (torch.arange(13.0)[:, None] - 6).expand(13, 13).flatten()[:, None].repeat(1, 2)
    table = checkpoint_filter(state, small(window_size=9))[name].view(17, 17, 2)
    assert table[8].abs().max() < 1e-5
    assert (table.diff(dim=0) > 0).all()
    torch.testing.assert_close(table[0, 0], torch.tensor([-6.0, -6.0]), atol=0.3, rtol=0)


@pytest.mark.parametrize("name", ["swin_tiny_r", "swin_tiny_m", "swin_tiny_m_dw"])
def test_regular_fields_move_with_the_image(name: str) -> None:
    """Shifted by the total stride, the interior of the last map is shifted by one point; plain Swin's is not."""
    stride, side = 8, 256
    wide = torch.randn(1, 3, side, side + stride, dtype=torch.float64)
    left, right = wide[..., :-stride], wide[..., stride:]

    def difference(model: SwinTransformer) -> float:
        first, second = (model.forward_features(images) for images in (left, right))
        inside = slice(12, -12)  # two layers of radius 3 (+1 convolved) at each of two strides reach less far
        return float((first[:, inside, 1:][:, :, inside] - second[:, inside, :-1][:, :, inside]).abs().max())

    with torch.no_grad():
        assert difference(randomise(small(name, window_size=5, dtype=torch.float64))) < 1e-12
        assert difference(randomise(small(dtype=torch.float64))) > 1e-3


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("size", [(64, 64), (44, 100)])
def test_features(ending: str, size: tuple[int, int]) -> None:
    model = small(f"swin_tiny{ending}", features_only=True, out_indices=(0, 1))
    for number, found in enumerate(model(torch.randn(1, 3, *size))):
        reduction = model.feature_info.reduction()[number]
        assert reduction == (4, 8)[number]
        assert found.shape == (1, model.feature_info.channels()[number], *(-(-side // reduction) for side in size))


def test_features_are_the_stages_maps() -> None:
    model = randomise(small())
    images = torch.randn(1, 3, 64, 64)
    last, maps = model.forward_intermediates(images, norm=True)
    torch.testing.assert_close(last, model.forward_features(images))
    torch.testing.assert_close(maps[1].permute(0, 2, 3, 1), last)
    first = model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(first[0], maps[0])


@pytest.mark.parametrize("ending", ["", "_key", "_m", "_gab"])
def test_checkpointing_changes_no_gradient(ending: str) -> None:
    model = randomise(small(f"swin_tiny{ending}", img_size=64))
    images = torch.randn(1, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_what_decays_and_what_does_not() -> None:
    names = small("swin_tiny_gab").no_weight_decay()
    assert {name.rsplit(".", 1)[1] for name in names} == {"relative_position_bias_table", "amplitude", "sigma"}
    assert len(names) == 3 * 4
    groups = param_groups_layer_decay(small("swin_tiny_m"), layer_decay=0.5)
    assert len({group["lr_scale"] for group in groups}) > 2


def test_a_new_head_stays_where_the_model_is() -> None:
    model = small(dtype=torch.float64).train()
    model.reset_classifier(7)
    assert model.get_classifier().weight.dtype == torch.float64
    assert model.head.training
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).shape == (2, 7)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).shape == (2, 16)
    model.reset_classifier(0, "")
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).shape == (2, 4, 4, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "global"}, "attention must"),
        ({"convolved": "keys"}, "convolved must"),
        ({"depthwise": True}, "depthwise needs"),
        ({"attention": "regular", "position_table": True}, "position_table is"),
        ({"attention": "regular", "attn_drop_rate": 0.1}, "attn_drop_rate must"),
        ({"attention": "regular", "window_size": 6}, "window_size must"),
        ({"attention": "regular", "window_size": 3.5}, "window_size must be an odd positive whole number"),
        ({"window_size": 3.5}, "window_size must"),
        ({"window_size": "3"}, "window_size must"),
        ({"window_size": (3, 3, 3)}, "window_size must"),
        ({"border": "wrap"}, "border must"),
        ({"num_heads": (2,)}, "num_heads must"),
        ({"num_heads": (2, 3)}, "num_heads must"),
        ({"global_pool": "max"}, "global_pool must"),
        ({"global_pool": ""}, "global_pool must"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)


def test_images_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="multiples of 4"):
        small()(torch.zeros(1, 3, 62, 64))


def test_as_many_rows_from_a_square_are_resized_and_a_rectangle_s_are_its_own() -> None:
    name = "layers.1.blocks.0.attn.relative_position_bias_table"
    square, wide = randomise(small(img_size=16)), small(img_size=(8, 40))  # 2×2 and 1×5 windows: 9 rows each
    table = square.state_dict()[name]
    expected = F.interpolate(table.t().reshape(1, -1, 3, 3), size=(1, 9), mode="bicubic")[0].flatten(1).t()
    torch.testing.assert_close(checkpoint_filter(square.state_dict(), wide)[name], expected)
    flat = randomise(small(img_size=(16, 56)))  # 2×7 windows: no square has their 39 rows
    assert torch.equal(checkpoint_filter(flat.state_dict(), flat)[name], flat.state_dict()[name])


@pytest.mark.parametrize("prune_head", [False, True])
def test_stopping_early_and_pruning_leave_no_norm_that_does_not_fit(prune_head: bool) -> None:
    model, images = small(), torch.randn(2, 3, 64, 64)
    whole, maps = model.forward_intermediates(images, indices=[0])
    last, early = model.forward_intermediates(images, indices=[0], stop_early=True)
    torch.testing.assert_close(early[0], maps[0])
    torch.testing.assert_close(last.permute(0, 3, 1, 2), maps[0])
    torch.testing.assert_close(whole, model.forward_features(images))
    model.prune_intermediate_layers([0], prune_head=prune_head)
    torch.testing.assert_close(model(images), last)


@pytest.mark.parametrize("ending", ["", "_key", "_r"])
def test_no_images(ending: str) -> None:
    for size in (64, 44):  # with windows that reach over the edge, too
        assert small(f"swin_tiny{ending}")(torch.randn(0, 3, size, size)).shape == (0, 5)


@pytest.mark.parametrize("attention", ["window", "regular"])
def test_normed_queries_and_keys_leave_the_weights_as_they_are(attention: str) -> None:
    options = {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4 if attention == "window" else 3,  # no window reaches over the map's end
        "num_classes": 5,
    }
    torch.manual_seed(0)
    plain = SwinTransformer(attention=attention, convolved="key", **options).double().eval()
    normed = SwinTransformer(attention=attention, convolved="key", qk_norm=True, **options).double().eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    answers = normed(images)
    assert not torch.allclose(answers, plain(images))
    with torch.no_grad():  # a key of any size points where it pointed
        for name, weight in normed.named_parameters():
            if ".qkv.key." in name:
                weight.mul_(10)
    torch.testing.assert_close(normed(images), answers, rtol=1e-4, atol=1e-6)


def test_normed_queries_and_keys_need_a_convolution() -> None:
    with pytest.raises(ValueError, match="qk_norm needs a convolution"):
        SwinTransformer(qk_norm=True)

"""AlterNet: the paper's sizes exactly, a block by hand in float64, and the authors' weights under our names."""

import copy
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.alternet import AlterNet, AttentionBlock, ConvolutionBlock, checkpoint_filter

SMALL = {"widths": (8, 8, 16, 16), "heads": (1, 2, 1, 2), "head_dim": 4, "num_classes": 5}


def small(name: str = "alternet_18", **options: object) -> AlterNet:
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options})
    for module in model.modules():  # statistics and scales of a trained model
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_var, module.weight):
                nn.init.uniform_(values, 0.5, 1.5)
            for values in (module.running_mean, module.bias):
                nn.init.normal_(values, std=0.5)
    return model.eval()


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [(18, 9_968_803), (34, 22_833_054), (50, 35_915_038), (101, 54_907_166), (152, 70_550_814)],
)
def test_parameters_and_stages(layers: int, parameters: int) -> None:
    model = timm.create_model(f"alternet_{layers}", device="meta")
    assert sum(weights.numel() for weights in model.parameters()) == parameters
    patterns = ["".join("a" if isinstance(block, AttentionBlock) else "c" for block in stage) for stage in model.stages]
    third = {18: "ca", 101: "c" * 17 + "ca" * 3, 152: "c" * 30 + "ca" * 3}.get(layers, "ca" * 3)
    if layers == 18:
        assert patterns == ["cc", "ca", third, "ca"]
    else:
        assert patterns == ["ccc", ("c" * 6 if layers == 152 else "cc") + "ca", third, "caca"]
    for stage, heads in zip(model.stages, (3, 6, 12, 24), strict=True):
        for block in stage:
            if isinstance(block, AttentionBlock):
                assert (block.attn.heads, block.attn.head_dim) == (heads, 64)
                assert block.attn.position_table.shape == (13, 13)
    assert model.no_weight_decay() == {name for name in model.state_dict() if name.endswith("position_table")}


@pytest.mark.parametrize(
    ("stem", "size", "grids", "reductions"),
    [("imagenet", 224, [56, 28, 14, 7], [4, 8, 16, 32]), ("cifar", 32, [32, 16, 8, 4], [1, 2, 4, 8])],
)
@pytest.mark.parametrize(("name", "channels"), [("18", [64, 128, 256, 512]), ("50", [256, 512, 1024, 2048])])
def test_grids(stem: str, size: int, grids: list[int], reductions: list[int], name: str, channels: list[int]) -> None:
    model = timm.create_model(f"alternet_{name}", stem=stem, features_only=True, device="meta")
    maps = model(torch.empty(1, 3, size, size, device="meta"))
    assert [tuple(each.shape[1:]) for each in maps] == [(c, g, g) for c, g in zip(channels, grids, strict=True)]
    assert model.feature_info.channels() == channels
    assert model.feature_info.reduction() == reductions


def normalised(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Batch normalisation as its formula, from the stored statistics."""
    mean, variance, scale, shift = (
        values[:, None, None] for values in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    return (x - mean) / (variance + norm.eps).sqrt() * scale + shift


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("grid", [(6, 9), (7, 4)])
def test_an_attention_block_by_hand(bottleneck: bool, grid: tuple[int, int]) -> None:
    model = small("alternet_50" if bottleneck else "alternet_18", window=3, dtype=torch.float64).requires_grad_(False)
    block = model.stages[1][-1]
    attention = block.attn
    nn.init.normal_(attention.position_table)
    heads, size, window = 2, 4, 3
    features = block.norm1.num_features
    assert block.conv.weight.shape == (features // (4 if bottleneck else 1), features, 1, 1)

    x = torch.randn(2, features, *grid, dtype=torch.float64)
    inner = normalised(
        block.norm2, torch.einsum("oc,bchw->bohw", block.conv.weight[..., 0, 0], gelu(normalised(block.norm1, x)))
    )
    queries, keys, values = (
        torch.einsum("oc,bchw->bohw", attention.qkv.weight, inner).unflatten(1, (3, heads, size)).unbind(1)
    )
    mixed = torch.zeros(2, heads, size, *grid, dtype=torch.float64)
    for top in range(0, grid[0], window):
        for left in range(0, grid[1], window):
            seen = [
                (y, x) for y in range(top, min(top + window, grid[0])) for x in range(left, min(left + window, grid[1]))
            ]
            for y, x_ in seen:
                logits = torch.stack(
                    [
                        (queries[..., y, x_] * keys[..., v, u]).sum(-1) / 2
                        + attention.position_table[v - y + 2, u - x_ + 2]
                        for v, u in seen
                    ]
                )
                weights = torch.softmax(logits, 0)
                mixed[..., y, x_] = sum(weights[n][..., None] * values[..., v, u] for n, (v, u) in enumerate(seen))
    out = torch.einsum("oc,bchw->bohw", attention.proj.weight, mixed.flatten(1, 2)) + attention.proj.bias[:, None, None]
    torch.testing.assert_close(block(x), x + out, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_convolution_block_by_hand(bottleneck: bool) -> None:
    model = small("alternet_50" if bottleneck else "alternet_18", dtype=torch.float64).requires_grad_(False)
    for stage, stride in ((0, 1), (1, 2)):
        block = model.stages[stage][0]
        x = torch.randn(2, block.norms[0].num_features, 9, 6, dtype=torch.float64)
        first = normalised(block.norms[0], x).clamp(min=0)
        skip = x if block.shortcut is None else F.conv2d(first, block.shortcut.weight, stride=stride)
        if bottleneck:
            branch = F.conv2d(first, block.convs[0].weight)
            branch = F.conv2d(
                normalised(block.norms[1], branch).relu(), block.convs[1].weight, stride=stride, padding=1
            )
            branch = F.conv2d(normalised(block.norms[2], branch).relu(), block.convs[2].weight)
        else:
            branch = F.conv2d(first, block.convs[0].weight, stride=stride, padding=1)
            branch = F.conv2d(normalised(block.norms[1], branch).relu(), block.convs[1].weight, padding=1)
        assert (block.shortcut is None) == (stage == 0 and not bottleneck)
        torch.testing.assert_close(block(x), skip + branch, rtol=1e-10, atol=1e-12)


def test_stem_and_head_by_hand() -> None:
    model = small(dtype=torch.float64, in_chans=2)
    x = torch.randn(2, 2, 33, 46, dtype=torch.float64)
    after = F.max_pool2d(F.conv2d(x, model.stem.conv.weight, stride=2, padding=3), 3, 2, 1)
    torch.testing.assert_close(model.stem(x), after)
    features = normalised(model.norm, model.stages(after)).relu()
    torch.testing.assert_close(model.forward_features(x), features)
    torch.testing.assert_close(model(x), features.mean((2, 3)) @ model.head.fc.weight.T + model.head.fc.bias)
    cifar = small(dtype=torch.float64, stem="cifar")
    x = torch.randn(1, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(cifar.stem(x), F.conv2d(x, cifar.stem.conv.weight, padding=1))


def theirs(model: AlterNet) -> dict[str, Tensor]:
    """A state dict as the authors' code would save it, from ours."""
    parts = {"norms.0": "bn", "convs.0": "conv1", "shortcut": "shortcut.0", "attn.proj": "attn.attn.to_out.0"}
    parts |= {f"norms.{n}": f"conv{n + 1}.0" for n in (1, 2)} | {f"convs.{n}": f"conv{n + 1}.2" for n in (1, 2)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        found = re.fullmatch(r"stages\.(\d)\.(\d+)\.(.+)", name)
        if found is None:
            part, leaf = name.rsplit(".", 1)
            part = {"stem.conv": "layer0.layer0.0", "norm": "classifier.0.bn", "head.fc": "classifier.0.dense"}[part]
            state[f"{part}.{leaf}"] = value
            continue
        block, (part, leaf) = f"layer{int(found[1]) + 1}.{found[2]}", found[3].rsplit(".", 1)
        if part == "attn.qkv":
            queries, keys, values = value[..., None, None].chunk(3)
            state[f"{block}.attn.attn.to_q.weight"] = queries
            state[f"{block}.attn.attn.to_kv.weight"] = torch.cat([keys, values])
        elif leaf == "position_table":
            state[f"{block}.attn.pos_embedding"] = value
        else:
            convolution = part == "attn.proj" and leaf == "weight"
            state[f"{block}.{parts.get(part, part)}.{leaf}"] = value[..., None, None] if convolution else value
    return state


@pytest.mark.parametrize("name", ["alternet_18", "alternet_50"])
@pytest.mark.parametrize("wrap", ["state_dict", "model", None])
def test_the_authors_weights_load(name: str, wrap: str | None) -> None:
    model = small(name)
    state = theirs(model)
    attention = {key.removeprefix("layer2.3.") for key in state if key.startswith("layer2.3.")}
    if name == "alternet_50":
        statistics = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
        assert attention == {f"norm{n}.{leaf}" for n in (1, 2) for leaf in statistics} | {
            "conv.weight",
            "attn.pos_embedding",
            *(f"attn.attn.{leaf}" for leaf in ("to_q.weight", "to_kv.weight", "to_out.0.weight", "to_out.0.bias")),
        }
    filtered = checkpoint_filter({wrap: state, "epoch": 3} if wrap else state, model)  # type: ignore[dict-item]
    assert filtered.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(filtered[key], value, rtol=0, atol=0)
    assert checkpoint_filter(filtered, model).keys() == filtered.keys()


def test_tables_are_resized_to_the_window() -> None:
    source, target = small(window=7), small(window=4)
    filtered = checkpoint_filter(theirs(source), target)
    target.load_state_dict(filtered)
    table = target.stages[1][1].attn.position_table
    assert table.shape == (7, 7)
    torch.testing.assert_close(table[3, 3], source.stages[1][1].attn.position_table[6, 6])


def test_any_size_and_padding_takes_no_part() -> None:
    model = small(window=7)
    for size in ((1, 1), (31, 65), (96, 32)):
        assert model(torch.randn(1, 3, *size)).isfinite().all()
    # One window of 7 over a smaller map is one window of any greater size, its table cut out of the greater's middle.
    wider = small(window=9)
    state = {name: value[2:-2, 2:-2] if name.endswith("table") else value for name, value in wider.state_dict().items()}
    model.load_state_dict(state)
    x = torch.randn(2, 3, 56, 40)  # grids 7×5, 4×3, 2×2 where there is attention
    torch.testing.assert_close(model(x), wider(x))


def test_checkpointing_changes_nothing() -> None:
    plain = small(drop_path_rate=0.2).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    x = torch.randn(3, 3, 24, 40)
    for model in (plain, saving):
        torch.manual_seed(1)
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    for one, other in zip(plain.buffers(), saving.buffers(), strict=True):  # the batch counted once, not twice
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_rates_and_activations() -> None:
    model = small("alternet_34", drop_path_rate=0.16, proj_drop_rate=0.3, attn_drop_rate=0.2, drop_rate=0.1)
    blocks = [block for stage in model.stages for block in stage]
    rates = [block.drop_path.drop_prob if isinstance(block.drop_path, DropPath) else 0.0 for block in blocks]
    assert rates == pytest.approx([0.16 * number / 16 for number in range(17)])
    attention = [block for block in blocks if isinstance(block, AttentionBlock)]
    assert {(block.attn.proj_drop.p, block.attn.attn_drop) for block in attention} == {(0.3, 0.2)}
    assert model.head.drop.p == 0.1
    assert all(isinstance(block.act, nn.ReLU) for block in blocks if isinstance(block, ConvolutionBlock))
    x = torch.linspace(-3, 3, 13)
    torch.testing.assert_close(attention[0].act(x), gelu(x))
    assert isinstance(small(attn_act_layer="relu").stages[1][1].act, nn.ReLU)


def test_intermediates_and_pruning() -> None:
    model = small()
    x = torch.randn(2, 3, 32, 48)
    last, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(last, model.forward_features(x))
    torch.testing.assert_close(maps[-1], last)
    early, some = model.forward_intermediates(x, indices=[0, 1], stop_early=True)
    torch.testing.assert_close(some[1], maps[1])
    torch.testing.assert_close(early, maps[1])
    torch.testing.assert_close(model.forward_head(last), model(x))
    assert model.forward_head(last, pre_logits=True).shape == (2, model.num_features)
    assert model.prune_intermediate_layers([0, 2]) == [0, 2]
    assert len(model.stages) == 3
    torch.testing.assert_close(model.forward_intermediates(x, indices=[2], intermediates_only=True)[0], maps[2])


def test_the_classifier_keeps_type_and_mode() -> None:
    model = small(dtype=torch.float64)
    model.reset_classifier(0)
    assert model(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).shape == (1, 16)
    model.reset_classifier(3, "max")
    assert model.get_classifier().weight.dtype == torch.float64
    assert model.num_classes == 3
    assert not model.get_classifier().training


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stem": "patch"}, "stem"),
        ({"attention_depths": (0, 1, 2, 1)}, "attention_depths"),
        ({"depths": (2, 2)}, "one number a stage"),
        ({"window": 0}, "window"),
        ({"global_pool": "x"}, "global_pool"),
        ({"global_pool": ""}, "global_pool"),
        ({"act_layer": "rellu"}, "relu"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        small(**options)


def test_wrong_images_are_named() -> None:
    with pytest.raises(UserError, match=r"\(batch, 3, height, width\)"):
        small()(torch.zeros(1, 1, 32, 32))

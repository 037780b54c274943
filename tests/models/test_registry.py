"""Every registered model does what a user of timm expects; at full size where nothing is computed, small where it is."""

import copy
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import group_parameters
from torch import Tensor, nn

import spatially
from spatially.models import CARDS, PAPERS
from spatially.models.costs import Cost, count, known

ALL = list(CARDS)

# The same architecture, narrow and shallow. Sides of 64 and 96×64 suit all of them.
SMALL = {
    "PoolingTransformer": {"depths": (1, 2, 1)},
    "RelativeTransformer": {"embed_dim": 24, "num_heads": 2, "depth": 3},
    "ConvolutionalTransformer": {"embed_dim": 24, "num_heads": 2, "depth": 3},
    "SwinTransformer": {"embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 1, 1, 1)},
    "AlterNet": {"widths": (8, 16, 24, 32), "heads": (1, 1, 2, 2), "head_dim": 8},
    "FlatResNet": {"base_width": 8, "depths": (1, 1, 1, 1)},
}
WIDTHS = {  # of the pooling transformers, whose widths depend on whether they pool
    True: {"dims": (12, 24, 48), "heads": (1, 2, 4)},
    False: {"dims": (24, 24, 24), "heads": (2, 2, 2)},
}
SIDE, OTHER = (64, 64), (96, 64)


def small_options(name: str) -> dict:
    card = CARDS[name]
    options = dict(SMALL[card.kind.__name__])
    if card.kind.__name__ == "PoolingTransformer":
        options |= WIDTHS[card.options.get("pool", True)]
    if card.kind.__name__ == "AlterNet":  # a stage of each make-up, at most as deep as its own
        options |= {"depths": (1, 2, 3, 2), "attention_depths": (0, 1, 1, 1)}
    return options | {"num_classes": 5, "img_size": SIDE}


def build(name: str, *, seed: int = 0, **changes: object) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, **{**small_options(name), **changes}).eval()


def picture(size: tuple[int, int] = SIDE, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)


def _distinct() -> list[str]:
    """One name for each architecture that is left when width and depth are small: what its size changes is nothing else."""
    seen: dict[str, str] = {}
    for name in ALL:
        built = {**CARDS[name].options, **small_options(name)}
        seen.setdefault(f"{CARDS[name].kind.__name__} {sorted(built.items(), key=str)}", name)
    return list(seen.values())


DISTINCT = _distinct()
ONNX = [
    "pit_tiny",
    "swin_tiny",
    "swin_tiny_m",
    "vit_small_relposmlp_gab",
    "vit_tiny_conv3",
    "alternet_18",
    "resnet50_flat",
]

each = pytest.mark.parametrize("name", ALL)
each_distinct = pytest.mark.parametrize("name", DISTINCT)


def test_names_are_all_there():
    sizes = ("tiny", "small", "base")
    swins = ("", "_key", "_query", "_value", "_key_dw", "_query_dw", "_value_dw", "_r", "_m", "_m_dw", "_gab")
    expected = {f"swin_{size}{kind}" for size in sizes for kind in swins}
    expected |= {f"pit_{size}{end}" for size in ("tiny", "xsmall", "small", "base") for end in ("", "_distilled")}
    expected |= {
        f"vit_{size}_relpos{kind}{end}"
        for size in ("small", "medium", "base")
        for kind in ("mlp", "bias")
        for end in ("", "_gab")
    }
    expected |= {f"vit_{size}_{kind}" for size in sizes for kind in ("pooled", "unpooled")}
    expected |= {f"alternet_{depth}" for depth in (18, 34, 50, 101, 152)}
    expected |= {f"vit_{size}_{kind}" for size in ("tiny", "small") for kind in ("conv3", "conv5", "conv7", "global")}
    expected |= {"resnet50_flat"}
    assert set(ALL) == expected
    assert set(ALL) <= set(timm.list_models())
    assert {card.paper for card in CARDS.values()} == set(PAPERS)


COUNTS = {  # definitions, section 11
    "pit_tiny": 4_847_272,
    "pit_tiny_distilled": 5_104_336,
    "pit_xsmall": 10_618_888,
    "pit_xsmall_distilled": 11_003_984,
    "pit_small": 23_461_912,
    "pit_small_distilled": 24_039_056,
    "pit_base": 73_764_840,
    "pit_base_distilled": 74_790_096,
    "swin_tiny": 28_288_354,
    "swin_tiny_r": 28_265_032,
    **{f"swin_tiny_{which}": 45_517_384 for which in ("key", "query", "value", "m")},
    **{f"swin_tiny_{which}_dw": 26_148_232 for which in ("key", "query", "value", "m")},
    "alternet_18": 9_968_803,
    "alternet_34": 22_833_054,
    "alternet_50": 35_915_038,
}
GMACS = {
    "pit_tiny": 0.70,
    "pit_xsmall": 1.40,
    "pit_small": 2.87,
    "pit_base": 12.4,
    "vit_tiny_unpooled": 1.25,
    "vit_small_unpooled": 4.60,
    "vit_base_unpooled": 17.6,
}


@each
def test_cost_is_the_listed_one_and_the_papers(name):
    cost = count(name)
    assert cost == known()[name], "write the list anew: python -m spatially.models.costs"
    assert cost.parameters == COUNTS.get(name, cost.parameters)
    assert cost.macs / 1e9 == pytest.approx(GMACS.get(name, cost.macs / 1e9), rel=0.01)


def test_cost_counts_what_a_layer_multiplies():
    assert count("resnet18") == Cost(11_689_512, 1_814_073_344)  # timm's own figures


@each_distinct
def test_forward_and_backward(name):
    model = build(name)
    logits = model.train()(picture())
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_distinct
def test_parts_make_the_whole(name):
    model = build(name)
    features = model.forward_features(picture())
    torch.testing.assert_close(model.forward_head(features), model(picture()))
    before = model.forward_head(features, pre_logits=True)
    assert before.shape == (2, model.num_features) == (2, model.head_hidden_size)


@each_distinct
def test_features(name):
    pyramid = timm.create_model(name, features_only=True, **small_options(name)).eval()
    for size in (SIDE, OTHER):
        maps = pyramid(picture(size))
        assert [one.shape[1] for one in maps] == pyramid.feature_info.channels()
        for one, reduction in zip(maps, pyramid.feature_info.reduction(), strict=True):
            for side, given in zip(one.shape[2:], size, strict=True):
                assert abs(side - given / reduction) < 2  # patches that overlap leave a margin
    whole = build(name)
    final, maps = whole.forward_intermediates(picture())
    torch.testing.assert_close(final, whole.forward_features(picture()))
    few = whole.forward_intermediates(picture(), indices=[0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(few[0], maps[0])


@each_distinct
def test_any_size(name):
    model = build(name, dtype=torch.float64)
    sizes = [SIDE, OTHER, (64, 160)]
    assert all(model(picture(size, dtype=torch.float64)).isfinite().all() for size in sizes)
    if CARDS[name].kind.__name__ not in ("AlterNet", "FlatResNet"):  # convolutions that pad take the smallest image
        with pytest.raises(ValueError, match="images must"):
            model(torch.zeros(1, 3, 2, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="images must"):
        model(torch.zeros(1, 4, 64, 64, dtype=torch.float64))


@each_distinct
def test_another_classifier(name):
    model = build(name, dtype=torch.float64)
    model.reset_classifier(7)
    assert model(picture(dtype=torch.float64)).shape == (2, 7)
    assert model.num_classes == 7
    model.reset_classifier(0)
    assert model(picture(dtype=torch.float64)).shape == (2, model.num_features)
    assert not list(model.get_classifier().parameters() if isinstance(model.get_classifier(), nn.Module) else [])


@each_distinct
def test_checkpointing_gives_the_same_gradients(name):
    plain = build(name, dtype=torch.float64, drop_path_rate=0.0).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    for model in (plain, saving):
        torch.manual_seed(2)  # some drop inside their position networks
        model(picture(dtype=torch.float64)).square().sum().backward()
    for (key, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=key)
    for (key, one), other in zip(plain.named_buffers(), saving.buffers(), strict=True):
        assert torch.equal(one, other), key


@each_distinct
def test_groups_for_decay(name):
    model = build(name)
    names = dict(model.named_parameters())
    assert model.no_weight_decay() <= set(names)
    positions = ("pos_embed", "relative_position_bias_table", "position_table", "gaussian_bias", "cls_token")
    assert {key for key in names if any(part in key for part in positions)} <= model.no_weight_decay()
    groups = group_parameters(model, model.group_matcher())
    assert sorted(key for keys in groups.values() for key in keys) == sorted(names)
    assert len(groups) > 2


@each_distinct
def test_saved_and_loaded(name, tmp_path: Path):
    model, other = build(name), build(name, seed=1)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    expected = model(picture())
    assert not torch.equal(build(name, seed=1)(picture()), expected)
    for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(same(picture()), expected, atol=0, rtol=0)
    loaded = build(name, seed=2, checkpoint_path=str(tmp_path / "weights.safetensors"))
    torch.testing.assert_close(loaded(picture()), expected, atol=0, rtol=0)


@each_distinct
def test_lower_precision(name):
    model = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(picture())
    torch.testing.assert_close(logits.float(), model(picture()), atol=0.1, rtol=0.1)
    assert model.bfloat16()(picture(dtype=torch.bfloat16)).dtype == torch.bfloat16


@each_distinct
def test_compiles_in_one_graph(name):
    model = build(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(picture()), model(picture()))
    torch.compiler.reset()


@each_distinct
def test_exports(name):
    model = build(name)
    program = torch.export.export(model, (picture(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(picture(batch=3)), model(picture(batch=3)))


@pytest.mark.parametrize("name", ONNX)
def test_exports_to_onnx(name, tmp_path: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build(name)
    torch.onnx.export(model, (picture(),), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: picture().numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(picture()), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@each
def test_full_size_trains_and_exports(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)
    images = picture((224, 224), batch=1)
    model.eval()(images).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    program = torch.export.export(model, (images,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), model(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["pit_tiny", "swin_tiny", "vit_small_relposmlp", "vit_tiny_conv3", "alternet_18", "resnet50_flat"]
)
def test_images_of_another_dtype_are_named(name):
    model = build(name)
    with pytest.raises(ValueError, match=r"images must be torch.float32 like the model's weights: got torch.float64"):
        model(picture(dtype=torch.float64))
    with pytest.raises(ValueError, match=r"images must be of a floating-point dtype: got torch.uint8"):
        model(torch.zeros(1, 3, *SIDE, dtype=torch.uint8))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(picture(dtype=torch.bfloat16)).shape == (2, 5)


@pytest.mark.parametrize("name", ["pit_tiny", "swin_tiny_key", "vit_tiny_conv3"])
def test_loads_as_a_subject(name):
    subject = spatially.load(name, pretrained=False)
    assert subject.describe()["parameters"] == known()[name].parameters


def test_weights_of_timm_load_by_file(tmp_path: Path):
    theirs = timm.create_model("pit_ti_224").eval()
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "pit.pth")
    ours = spatially.load("pit_tiny", checkpoint=tmp_path / "pit.pth").model
    images = picture((224, 224))
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)

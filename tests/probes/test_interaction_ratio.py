"""The spatial interaction ratio against loops, closed forms and its own bounds."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import timm
import torch
from rich.console import Console
from torch import nn

import spatially
from spatially.data import Images
from spatially.errors import NotApplicable, UserError
from spatially.observe import attention
from spatially.observe.attention_trace import ALIKE
from spatially.perturb.pixels import as_float
from spatially.probes import InteractionRatio, interaction_ratio_figures
from spatially.probes.interaction_ratio import CHANGED, UNRECOGNISED
from spatially.study import Study, run_study

subject_of = run_path(str(Path(__file__).parents[1] / "observe" / "networks.py"))["subject_of"]


def pictures(subject: spatially.Subject, count: int = 5) -> Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, *subject.preprocessing.input_size, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=np.arange(count) % 5)


def by_loops(subject: spatially.Subject, images: Images, probe: InteractionRatio) -> np.ndarray:
    """(images, thresholds, layers), one query at a time."""
    with torch.no_grad(), attention(subject) as maps:
        subject(as_float(images.batch(np.arange(len(images)), subject.device)[0]))
    found = []
    for layer, weights in maps:
        if not layer.grid[0]:
            continue
        spatial = weights[:, :, layer.prefix :, layer.key_prefix :].double().numpy()
        if probe.renormalise:
            spatial = spatial / spatial.sum(-1, keepdims=True)
        images_count, _, queries, keys = spatial.shape
        ratios = np.zeros((images_count, len(probe.thresholds)))
        for image in range(images_count):
            for number, threshold in enumerate(probe.thresholds):
                counts = [
                    ((spatial[image, :, query] > threshold).sum(0) >= probe.min_heads).sum() for query in range(queries)
                ]
                ratios[image, number] = np.mean(counts) / keys
        found.append(ratios)
    return np.stack(found, -1)


@pytest.mark.parametrize("name", ["timm vit", "timm cait", "hf swin", "own convolutional vit"])
@pytest.mark.parametrize("options", [{}, {"min_heads": 2, "renormalise": True, "thresholds": (0.02, 0.05, 0.3)}])
def test_equals_loops(name, options):
    subject, probe = subject_of(name), InteractionRatio(**options)
    count = 1 if name == "hf swin" else 3
    images = pictures(subject, count)
    result = probe.run(subject, images)
    expected = by_loops(subject, images, probe)
    measured = result.image_interaction_ratio.transpose("image", "threshold", "layer").sel(image=images.index)
    np.testing.assert_allclose(measured, expected, atol=2e-6)
    np.testing.assert_allclose(result.interaction_ratio, expected.mean(0), atol=2e-6)
    assert (result.interaction_ratio.values <= result.bound.values + 1e-9).all()
    assert result.interaction_ratio.dims == ("threshold", "layer")
    assert set(result.kind.values) == {"attention"}


def test_even_attention_reaches_all_or_nothing():
    """With no queries and keys all 16 positions and the class token get 1/17 each: above 1 %, below 10 %."""
    subject = spatially.load(
        timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5), input_size=64, device="cpu"
    )
    with torch.no_grad():
        for block in subject.model.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    images = pictures(subject)
    result = InteractionRatio(thresholds=(0.01, 0.06, 0.1)).run(subject, images)
    np.testing.assert_array_equal(result.interaction_ratio, [[1, 1], [0, 0], [0, 0]])
    scaled = InteractionRatio(thresholds=(0.06,), renormalise=True).run(subject, images)  # 1/16 without the class token
    np.testing.assert_array_equal(scaled.interaction_ratio, [[1, 1]])
    assert (InteractionRatio(min_heads=4).run(subject, images).interaction_ratio == 0).all()  # of 3 heads


def test_bound_of_vit_base():
    """At 10 % twelve heads reach at most 120 of 196 positions, however sharp their attention."""
    model = timm.create_model("vit_base_patch16_224", depth=1, num_classes=5)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(6)
    subject = spatially.load(model, input_size=224, device="cpu")
    result = InteractionRatio().run(subject, pictures(subject, 1))
    assert result.bound.sel(threshold=0.1).item() == pytest.approx(120 / 196)
    assert 0 < result.interaction_ratio.sel(threshold=0.1).item() <= 120 / 196


def test_sharp_attention_reaches_one_position_a_head():
    subject = subject_of("own global vit")
    with torch.no_grad():
        for block in subject.model.blocks:
            block.attn.qkv.weight.mul_(100)
    result = InteractionRatio().run(subject, pictures(subject))
    assert (result.interaction_ratio.sel(threshold=0.1) <= 4.5 / 16).all()
    assert (result.interaction_ratio.sel(threshold=0.1) >= 0.9 / 16).all()


@pytest.mark.parametrize("name", ["timm swin", "timm levit", "torchvision vit"])
def test_batches_do_not_matter(name):
    subject = subject_of(name)
    images = pictures(subject)
    one, four = (InteractionRatio(seed=3).run(subject, images, batch=batch) for batch in (1, 4))
    np.testing.assert_allclose(one.interaction_ratio, four.interaction_ratio, atol=1e-3)
    assert (one.interaction_ratio_low <= one.interaction_ratio).all()
    assert (one.interaction_ratio_high >= one.interaction_ratio).all()


def test_convolutions_by_their_kernels():
    model = timm.create_model("resnet18", num_classes=5)
    subject = spatially.load(model, name="resnet18", input_size=64, device="cpu")
    result = InteractionRatio().run(subject, pictures(subject))
    stages = [9 / 16**2] * 4 + [9 / 16**2] + [9 / 8**2] * 3 + [9 / 8**2] + [9 / 4**2] * 3 + [9 / 4**2, 1, 1, 1]
    for threshold in (0.01, 0.1):
        np.testing.assert_allclose(result.interaction_ratio.sel(threshold=threshold), [49 / 64**2, *stages], rtol=1e-6)
    assert set(result.kind.values) == {"convolution"}
    assert list(result["field"].values[:2]) == ["7×7", "3×3"]
    with pytest.raises(NotApplicable, match="resnet18 has no attention layers"):
        InteractionRatio(convolutions="none").run(subject, pictures(subject))


def test_convolutions_among_attention():
    subject = subject_of("timm coatnet")
    images = pictures(subject)
    alone, all_of_them = (InteractionRatio(convolutions=one).run(subject, images) for one in ("auto", "all"))
    assert set(alone.kind.values) == {"attention"}
    kinds = list(all_of_them.kind.values)
    assert kinds[0] == "convolution"
    assert kinds[-1] == "attention"
    attending = all_of_them.interaction_ratio[:, np.array(kinds) == "attention"]
    np.testing.assert_array_equal(attending, alone.interaction_ratio)


class ByHand(nn.Module):
    """A patch embedding and attention whose softmax is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, stride=8)
        self.attend = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.attend(self.stem(images).flatten(2).transpose(1, 2)).chunk(3, -1)
        logits = queries @ keys.transpose(1, 2)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        return self.head((weights / weights.sum(-1, keepdim=True) @ values).mean(1))


def test_attention_that_is_not_recognised_is_no_convolution():
    subject = spatially.load(ByHand(), name="mine", input_size=32, device="cpu")
    with pytest.raises(NotApplicable, match="mine computes its attention in a form that is not recognised"):
        InteractionRatio().run(subject, pictures(subject))
    result = InteractionRatio(convolutions="all").run(subject, pictures(subject))
    assert list(result.name.values) == ["stem"]
    gated = spatially.load(timm.create_model("gcresnext26ts", num_classes=5), input_size=64, device="cpu")
    assert set(InteractionRatio().run(gated, pictures(gated, 1)).kind.values) == {"convolution"}


def test_channel_attention_does_not_apply():
    subject = subject_of("timm xcit")
    with pytest.raises(NotApplicable, match="mixes channels, not positions"):
        InteractionRatio().run(subject, pictures(subject))


def test_attention_that_no_layer_shows_is_named():
    model = timm.create_model("davit_tiny", embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1))
    subject = spatially.load(model, input_size=64, num_classes=1000, device="cpu")
    result = InteractionRatio().run(subject, pictures(subject, 2))
    named = [f"stages.{stage}.blocks.0.1.attn" for stage in range(4)]
    assert result.attrs["attention_left_out"] == f"{', '.join(named)} (mixes channels, not positions)"
    assert not set(named) & set(result["name"].values)
    caption = interaction_ratio_figures.captions({"davit": result})["depth"]
    assert result.attrs["attention_left_out"] in caption


class Attends(nn.Module):
    """Attention as usual, or with weights that are halved, hidden or the same for all queries."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.parts(x).chunk(3, -1)
        if self.kind == "alike":
            return x + (values * queries.mean(-1, keepdim=True).softmax(1)).sum(1, keepdim=True)
        logits = queries @ keys.transpose(1, 2)
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True) if self.kind == "hidden" else logits.softmax(-1)
        return x + (0.5 * weights if self.kind == "halved" else weights.clone()) @ values


class Mixed(nn.Module):
    """A layer of attention as usual, and another."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, stride=8)
        self.first, self.second = Attends("usual"), Attends(second)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.stem(images).flatten(2).mT)).mean(1))


@pytest.mark.parametrize(
    ("second", "layers", "left"),
    [
        ("usual", ["first", "second"], None),
        ("halved", ["first", "second"], f"second ({CHANGED})"),
        ("hidden", ["first"], f"second ({UNRECOGNISED})"),
        ("alike", ["first"], f"second ({ALIKE})"),
    ],
)
def test_what_layers_do_not_show_is_said(second, layers, left):
    subject = spatially.load(Mixed(second), name="mixed", input_size=32, device="cpu")
    result = InteractionRatio().run(subject, pictures(subject, 2))
    assert list(result["name"].values) == layers
    assert result.attrs.get("attention_left_out") == left


@pytest.mark.parametrize("name", ["timm vit", "timm swin", "timm levit", "timm beit", "torchvision maxvit", "hf swin"])
def test_nothing_is_left_out_of_a_usual_model(name):
    subject = subject_of(name)
    assert "attention_left_out" not in InteractionRatio().run(subject, pictures(subject, 1)).attrs


def test_weights_mixed_among_heads_are_said_to_be():
    subject = subject_of("timm cait")
    left = InteractionRatio().run(subject, pictures(subject, 1)).attrs["attention_left_out"]
    assert CHANGED in left
    assert "blocks.0.attn" in left


def test_what_cannot_be():
    with pytest.raises(UserError, match="thresholds must be numbers between 0 and 1"):
        InteractionRatio(thresholds=(0.1, 1.5))
    with pytest.raises(UserError, match="thresholds must differ"):
        InteractionRatio(thresholds=(0.1, 0.1))
    with pytest.raises(UserError, match="min_heads"):
        InteractionRatio(min_heads=0)
    with pytest.raises(UserError, match="did you mean 'all'"):
        InteractionRatio(convolutions="al")
    subject = subject_of("timm vit")
    with torch.no_grad():
        subject.model.blocks[1].attn.qkv.weight[0] = torch.nan
    with pytest.raises(UserError, match=r"attention of blocks\.1\.attn is NaN"):
        InteractionRatio().run(subject, pictures(subject))


def test_figures_and_tables_show_what_was_measured():
    results = {}
    for name in ("timm vit", "own pit", "timm swin"):
        subject = subject_of(name)
        results[name] = InteractionRatio().run(subject, pictures(subject))
    figure = interaction_ratio_figures.figures(results)["depth"]
    figure.draw_without_rendering()
    for panel, threshold in zip(figure.axes, (0.01, 0.1), strict=True):
        for line, dataset in zip(panel.get_lines(), results.values(), strict=True):
            np.testing.assert_allclose(line.get_ydata(), dataset.interaction_ratio.sel(threshold=threshold))
            assert line.get_xdata()[0] == 0
            assert line.get_xdata()[-1] == 1
    table = interaction_ratio_figures.tables(results)["interaction"]
    assert len(table) == sum(2 * dataset.sizes["layer"] for dataset in results.values())
    row = table[(table.model == "own pit") & (table.threshold == 0.1) & (table.layer == 1)].iloc[0]
    assert row.interaction_ratio == pytest.approx(float(results["own pit"].interaction_ratio[1, 1]))
    assert (row["name"], row.heads, row.rows) == ("transformers.1.blocks.0.attn", 4, 4)
    assert "own pit" in interaction_ratio_figures.descriptions(results)["depth"]
    assert set(interaction_ratio_figures.captions(results)) == {"depth", "interaction"}


def test_study_equals_the_probe_run_alone(tmp_path):
    model = {"model": "pit_ti_224", "pretrained": False, "num_classes": 12, "model_options": {"depth": (1, 1, 1)}}
    study = Study(models=[model], data={"source": "shapes", "limit": 6}, probes={"interaction_ratio": {}}, batch=4)
    stored = run_study(study, tmp_path, device="cpu", console=Console(quiet=True)).results()["interaction_ratio"][
        "pit_ti_224"
    ]
    subject = spatially.load(**model, device="cpu")
    alone = InteractionRatio().run(subject, spatially.open_images("shapes", subject, limit=6), batch=4)
    assert stored.drop_attrs().equals(alone.drop_attrs())
    assert list(stored.rows.values) == [27, 14, 7]

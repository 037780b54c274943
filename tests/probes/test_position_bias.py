"""Biases whose Gaussian is known, and models that have none."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from rich.console import Console
from torch import nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.probes import PositionBias
from spatially.study import Study, run_study
from spatially.surgery import reset_positions

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 4, "num_classes": 5}


def loaded(model: nn.Module, size: int = 224) -> tuple[spatially.Subject, spatially.data.Images]:
    subject = spatially.load(model, name="model", input_size=size, device="cpu")
    pixels = np.zeros((3, size, size, 3), dtype=np.uint8)
    return subject, spatially.open_images(pixels, subject, labels=[0, 1, 2])


def test_a_gaussian_bias_reads_its_own_sigma_in_every_layer() -> None:
    model = timm.create_model("vit_small_relposmlp_gab", **SMALL)
    for number, block in enumerate(model.blocks):
        nn.init.zeros_(block.attn.rel_pos.mlp.fc2.weight)
        nn.init.zeros_(block.attn.rel_pos.mlp.fc2.bias)
        nn.init.constant_(block.attn.gaussian_bias.sigma, 3.0 + number)
    result = PositionBias(fresh=False).run(*loaded(model))
    assert result.r_squared.dims == ("layer",)
    np.testing.assert_allclose(result.r_squared, 1, atol=1e-6)
    np.testing.assert_allclose(result.sigma_x, [3, 4], rtol=1e-3)
    np.testing.assert_allclose(result.sigma_y, [3, 4], rtol=1e-3)
    np.testing.assert_allclose(result.centre_x, 6, atol=1e-3)
    assert result.kind.values.tolist() == ["relative+gaussian"] * 2
    assert result.name.values.tolist() == ["blocks.0.attn.rel_pos", "blocks.1.attn.rel_pos"]
    assert result.bias.dims == ("layer", "y", "x")
    assert result.bias.values[0, 6, 7] == pytest.approx(np.exp(-1 / 18), rel=1e-5)


def test_the_mean_over_heads_at_the_query_that_was_asked_for() -> None:
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny", img_size=56, embed_dim=16, depths=(1, 1), num_heads=(2, 4), num_classes=5)
    for layer in model.layers:
        nn.init.normal_(layer.blocks[0].attn.relative_position_bias_table)
    result = PositionBias(position=(1, 5), fresh=False).run(*loaded(model, 56))
    with torch.no_grad():
        expected = model.layers[1].blocks[0].attn.bias().mean(0)[1 * 7 + 5].unflatten(0, (7, 7))
    np.testing.assert_allclose(result.bias.sel(layer=1), expected.numpy(), atol=1e-6)
    first = result.first_bias.sel(query_y=1, query_x=5)
    np.testing.assert_allclose(first, result.bias.sel(layer=0), atol=1e-6)
    assert result.first_bias.shape == (7, 7, 7, 7)


def test_embeddings_through_their_similarity() -> None:
    """Vectors whose similarity is a Gaussian of their distance, by construction: the square root of the wanted matrix."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL | {"embed_dim": 256})
    y, x = np.divmod(np.arange(196), 14)
    similarity = np.exp(-((y[:, None] - y) ** 2 / (2 * 3.0**2) + (x[:, None] - x) ** 2 / (2 * 2.0**2)))
    values, vectors = np.linalg.eigh(similarity)
    root = vectors * np.sqrt(values.clip(0))
    with torch.no_grad():
        model.pos_embed[0, 1:, :196] = torch.from_numpy(root).float()
        model.pos_embed[0, 1:, 196:] = 0
    result = PositionBias(fresh=False).run(*loaded(model))
    assert result.kind.values.tolist() == ["absolute"]
    assert float(result.r_squared[0]) == pytest.approx(1, abs=1e-4)
    assert (float(result.sigma_x[0]), float(result.sigma_y[0])) == pytest.approx((2, 3), rel=1e-2)


def test_layers_of_different_grids_are_filled_up() -> None:
    model = timm.create_model(
        "levit_128s", img_size=64, embed_dim=(32, 32), num_heads=(2, 2), depth=(1, 1), key_dim=16, num_classes=5
    )
    for name, parameter in model.named_parameters():
        if "attention_biases" in name:
            nn.init.normal_(parameter)
    result = PositionBias().run(*loaded(model, 64))
    sizes = list(zip(result.rows.values.tolist(), result.columns.values.tolist(), strict=True))
    assert len(set(sizes)) > 1
    for number, (rows, columns) in enumerate(sizes):
        map = result.bias.values[number]
        assert np.isfinite(map[:rows, :columns]).all()
        assert np.isfinite(map).sum() == rows * columns
    assert "fresh_bias" not in result  # nobody knows how to draw them


def test_beside_it_the_positions_drawn_anew_and_the_model_as_before() -> None:
    model = timm.create_model("vit_relpos_small_patch16_224", **SMALL)
    subject, images = loaded(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fingerprint = subject.fingerprint
    result = PositionBias(seed=3).run(subject, images)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert subject.fingerprint == fingerprint
    reset_positions(subject, seed=3)
    again = PositionBias(fresh=False).run(subject, images)
    np.testing.assert_array_equal(result.fresh_bias, again.bias)
    assert not np.allclose(result.bias, result.fresh_bias)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: timm.create_model("resnet10t", num_classes=5),
            "model has no position embedding and no position bias$",
        ),
        (
            lambda: timm.create_model("vit_small_patch16_dinov3", **SMALL),
            "only rotary positions",
        ),
    ],
)
def test_a_model_without_is_not_applicable(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        PositionBias().run(*loaded(model()))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="position must be 'centre', or a row and a column"):
        PositionBias(position="middle")
    with pytest.raises(UserError, match="unknown baseline"):
        PositionBias(baseline="mean")
    with pytest.raises(UserError, match=r"position \(in blocks.0.attn.rel_pos\) \(14, 0\) lies outside the grid"):
        PositionBias(position=(14, 0)).run(*loaded(timm.create_model("vit_relpos_small_patch16_224", **SMALL)))


def test_a_study_looks_once_whatever_the_batch(tmp_path: Path) -> None:
    model = {
        "model": "vit_relpos_small_patch16_224",
        "pretrained": False,
        "model_options": SMALL | {"img_size": 64},
        "input_size": 64,
    }
    files = []
    for batch in (2, 5):
        study = Study(models=[model], data={"source": "shapes", "limit": 10}, probes={"position_bias": {}}, batch=batch)
        store = run_study(study, tmp_path / str(batch), device="cpu", console=Console(quiet=True))
        files.append(store.results()["position_bias"]["vit_relpos_small_patch16_224"])
    assert files[0].drop_attrs().equals(files[1].drop_attrs())


def test_figures_and_table() -> None:
    results = {}
    for name in ("vit_relpos_small_patch16_224", "vit_small_relposmlp_gab"):
        torch.manual_seed(0)
        results[name] = PositionBias().run(*loaded(timm.create_model(name, **SMALL)))
    drawing = PositionBias.drawing()
    drawn = drawing.figures(results)
    assert list(drawn) == ["layers", "queries", "fits"]
    shown = [panel for panel in drawn["layers"].axes if panel.images]
    assert len(shown) == 8  # two models, two layers, and the same drawn anew
    expected = results["vit_relpos_small_patch16_224"].bias.values[1]
    picture = np.asarray(shown[1].images[0].get_array())
    np.testing.assert_allclose(picture, (expected - expected.min()) / np.ptp(expected), atol=1e-12)
    table = drawing.tables(results)["position_bias"]
    assert table.shape == (4, 7)
    assert table["layer"].tolist() == [1, 2, 1, 2]
    np.testing.assert_allclose(table["sigma_x"][:2], results["vit_relpos_small_patch16_224"].sigma_x)
    assert set(drawn) <= set(drawing.captions(results))
    assert set(drawn) == set(drawing.descriptions(results))

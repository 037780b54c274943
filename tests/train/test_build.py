"""Models as recipes and users want them, and the weights they start from."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spatially.errors import UserError
from spatially.train.build import BuiltModel, build_model, check_model, input_size, normalisation
from spatially.train.library import read_recipe
from spatially.train.recipe import Recipe

TINY = {"embed_dim": 16, "num_heads": 2, "depth": 2}


def recipe(**changes: Any) -> Recipe:
    plain = Recipe(name="test", epochs=1, batch=4, optimiser={"name": "sgd", "lr": 0.1})  # type: ignore[arg-type]
    return plain.override(changes)


def build(name: str, chosen: Recipe | None = None, **options: Any) -> BuiltModel:
    given = {"recipe": chosen or recipe(), "classes": 5, "size": (32, 32)} | options
    return build_model(name, **given)


@pytest.mark.parametrize(
    ("name", "arguments", "grid"),
    [
        ("vit_tiny_patch16_224", TINY, 16),
        ("vit_tiny_conv3", TINY, 16),
        ("vit_tiny_unpooled", {"dims": (16, 16, 16), "heads": (2, 2, 2), "depths": (1, 1, 1)}, 16),
        ("pit_tiny", {"dims": (8, 16, 32), "heads": (1, 2, 4), "depths": (1, 1, 1)}, 31),
        ("pit_ti_224", {}, 31),
        ("swin_tiny_m", {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}, 16),
    ],
)
def test_small_images_have_patches_of_two_by_two(name: str, arguments: dict[str, Any], grid: int) -> None:
    chosen = read_recipe("park-cifar")
    assert input_size(name, chosen, None) == (32, 32)
    built = build(name, chosen, arguments=arguments)
    seen: list[torch.Size] = []
    first = next(module for module in built.model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    assert built.model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    assert tuple(seen[0][-2:]) == (grid, grid)
    again = timm.create_model(name, num_classes=5, **built.arguments)
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in built.model.state_dict().items()
    }


def test_a_recipe_wishes_and_a_user_insists() -> None:
    chosen = read_recipe("park-cifar")
    small = {"depths": (1, 1), "attention_depths": (0, 0), "widths": (4, 8), "heads": (1, 1)}
    alternet = build("alternet_18", chosen, arguments=small)
    assert alternet.arguments["stem"] == "cifar"
    assert alternet.unused == ("patch_size",)
    resnet = build("resnet10t", chosen)
    assert set(resnet.unused) == {"patch_size", "stem", "img_size"}
    assert "patch_size" in build("mixer_s32_224", chosen).unused  # its name says it
    with pytest.raises(UserError, match="does not take these"):
        build("resnet10t", chosen, arguments={"stem": "cifar"})
    assert build("alternet_18", chosen, arguments={**small, "stem": "imagenet"}).arguments["stem"] == "imagenet"


@pytest.mark.parametrize(
    ("name", "given", "listed"),
    [
        ("vit_tiny_patch16_224", {"depth": "two"}, "depth='two'"),
        ("vit_tiny_patch16_224", {"embed_dim": 50}, "embed_dim=50"),
        ("swin_tiny", {"depths": 3}, "depths=3"),
        ("swin_tiny", {"embed_dim": "foo"}, "embed_dim='foo'"),
        ("pit_tiny", {"heads": [0, 0, 0]}, "heads=[0, 0, 0]"),
    ],
)
def test_what_a_constructor_refuses_is_the_users_mistake(name: str, given: dict[str, Any], listed: str) -> None:
    with pytest.raises(UserError) as told:
        build(name, arguments=given)
    assert str(told.value).startswith(f"{name} cannot be built with {listed} (")
    assert str(told.value).endswith("): give other values with --model-arg")
    assert len(str(told.value).splitlines()) == 1


def test_the_data_says_how_many_classes_and_channels_there_are() -> None:
    with pytest.raises(UserError, match="num_classes is the data's number of classes, but came as 7: leave it out"):
        build("resnet10t", arguments={"num_classes": 7})
    with pytest.raises(UserError, match="num_classes is the data's"):
        build("resnet10t", recipe(**{"model.arguments": {"num_classes": 7}}))
    with pytest.raises(UserError, match=r"in_chans must be 3 \(RGB images\), but came as 1"):
        build("resnet10t", arguments={"in_chans": 1})
    assert build("resnet10t", arguments={"in_chans": 3}).arguments == {"in_chans": 3}


def test_drop_rates_reach_the_model_and_not_its_record() -> None:
    chosen = recipe(**{"regularisation.drop_path": 0.4, "regularisation.dropout": 0.2})
    built = build("vit_tiny_patch16_224", chosen, arguments=TINY)
    assert built.model.blocks[1].drop_path1.drop_prob == pytest.approx(0.4)  # type: ignore[index, union-attr]
    assert built.model.head_drop.p == 0.2  # type: ignore[union-attr]
    assert set(built.arguments) == {"img_size", *TINY}
    without = build("swin_tiny", arguments={"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)})
    rates = [module.drop_prob for module in without.model.modules() if type(module).__name__ == "DropPath"]
    assert not any(rates)  # the family's own default is 0.1


def test_the_seed_alone_draws_the_weights() -> None:
    torch.manual_seed(5)
    first = build("vit_tiny_patch16_224", arguments=TINY).model.state_dict()
    torch.manual_seed(6)
    second = build("vit_tiny_patch16_224", arguments=TINY).model.state_dict()
    other = build("vit_tiny_patch16_224", recipe(**{"run.seed": 1}), arguments=TINY).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def test_sizes_and_normalisation_are_the_models_own() -> None:
    assert input_size("swin_tiny", recipe(), None) == (224, 224)
    assert input_size("vit_base_patch16_384", recipe(), None) == (384, 384)
    assert input_size("swin_tiny", recipe(), 96) == (96, 96)
    assert input_size("swin_tiny", read_recipe("park-cifar"), [64, 96]) == (64, 96)
    with pytest.raises(UserError, match="input_size must be at least 8, but came as 64×7"):
        input_size("swin_tiny", recipe(), (64, 7))
    assert normalisation("vit_small_relposmlp") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of a ViT for seven classes."""
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, **TINY)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("positions", ["keep", "reset", "zero"])
def test_fine_tuning_takes_all_but_the_head_and_the_positions_on_request(weights: Path, positions: str) -> None:
    changes = {"initialisation.checkpoint": str(weights), "initialisation.positions": positions}
    built = build("vit_tiny_patch16_224", recipe(**changes), arguments=TINY).model.state_dict()
    before = load_file(weights / "model.safetensors")
    fresh = build("vit_tiny_patch16_224", arguments=TINY).model.state_dict()
    differ = {name for name in built if name not in before or not _equal(built[name], before[name])}
    assert differ == {"head.weight", "head.bias"} | ({"pos_embed"} if positions != "keep" else set())
    assert torch.equal(built["head.weight"], fresh["head.weight"])
    if positions == "zero":
        assert not built["pos_embed"].any()
    if positions == "reset":
        assert 0.01 < built["pos_embed"].std() < 0.03  # drawn as ViT draws it, and not as the file has it


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def test_a_checkpoint_that_does_not_fit_is_refused(weights: Path) -> None:
    other = recipe(**{"initialisation.checkpoint": str(weights / "model.safetensors")})
    with pytest.raises(UserError, match=r"does not fit the model: .* missing: "):
        build("resnet10t", other)
    with pytest.raises(UserError, match=r"head\.weight \[7, 16\] instead of \[5, 16\]"):
        build("vit_tiny_patch16_224", other.override({"initialisation.head": "keep"}), arguments=TINY)
    kept = build("vit_tiny_patch16_224", other.override({"initialisation.head": "keep"}), arguments=TINY, classes=7)
    assert kept.model.head.weight.shape == (7, 16)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="there is no file"):
        build("resnet10t", recipe(**{"initialisation.checkpoint": str(weights / "nothing.safetensors")}))


def test_weights_of_timm_start_our_model_with_a_gaussian_bias(tmp_path: Path) -> None:
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    theirs = timm.create_model("vit_relpos_small_patch16_224", img_size=32, num_classes=7, **small)
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    chosen = read_recipe("kim-finetune").override({"initialisation.checkpoint": str(tmp_path / "timm.safetensors")})
    ours = build("vit_small_relposmlp_gab", chosen, arguments=small).model.state_dict()
    before = theirs.state_dict()
    same = {name for name in ours if name in before and _equal(ours[name], before[name])}
    assert "blocks.1.mlp.fc1.weight" in same
    assert "head.weight" not in same
    assert not any("rel_pos" in name and name.endswith("weight") for name in same)
    assert any(".gaussian_bias." in name for name in ours)


def test_a_recipe_that_starts_from_weights_says_what_to_do_without_any() -> None:
    with pytest.raises(UserError, match="there are no pretrained weights for swin_tiny_m here"):
        build("swin_tiny_m", read_recipe("kim-finetune"), size=(224, 224))
    scratch = read_recipe("kim-finetune").override({"initialisation.pretrained": False})
    assert build("vit_tiny_patch16_224", scratch, arguments=TINY).model(torch.zeros(1, 3, 32, 32)).shape == (1, 5)


def test_positions_of_a_model_without_any(tmp_path: Path) -> None:
    save_file(timm.create_model("resnet10t", num_classes=5).state_dict(), tmp_path / "resnet.safetensors")
    chosen = read_recipe("kim-finetune").override({"initialisation.checkpoint": str(tmp_path / "resnet.safetensors")})
    with pytest.raises(UserError, match=r"initialisation\.positions=keep"):
        build("resnet10t", chosen)


def test_gradient_checkpointing_is_switched_on() -> None:
    built = build("vit_tiny_patch16_224", recipe(**{"run.checkpointing": True}), arguments=TINY)
    assert built.model.grad_checkpointing is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swin_tny_m", "unknown model 'swin_tny_m': did you mean 'swin_tiny_m'"),
        ("qqqq", r"unknown model 'qqqq': \d+ are known. They are listed by: spatially models$"),
        ("torchvision/resnet18", "cannot be trained by a recipe"),
        ("package.module:build", "cannot be trained by a recipe"),
    ],
)
def test_names_that_cannot_be_trained(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(name)


SMALL_SWIN = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 3}


@pytest.mark.parametrize("name", ["swin_tiny_key", "swin_tiny_m", "swin_tiny_value"])
def test_queries_and_keys_beside_a_convolution_are_normalised_unless_the_plain_form_is_asked_for(name: str) -> None:
    normed, plain = (
        build(name, arguments=SMALL_SWIN),
        build(name, recipe(**{"model.qk_norm": False}), arguments=SMALL_SWIN),
    )
    assert normed.arguments["qk_norm"] is True
    assert plain.arguments["qk_norm"] is False
    plain.model.load_state_dict(normed.model.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(plain.model.eval()(images), normed.model.eval()(images))
    assert "qk_norm" not in build("swin_tiny", arguments=SMALL_SWIN).arguments
    assert "qk_norm" not in build("swin_tiny_r", arguments=SMALL_SWIN).arguments
    assert build("swin_tiny", arguments=SMALL_SWIN | {"convolved": "key"}).arguments["qk_norm"] is True
    by_recipe = build(name, recipe(**{"model.arguments": {"qk_norm": False}}), arguments=SMALL_SWIN)
    assert by_recipe.arguments["qk_norm"] is False


@pytest.mark.parametrize("normed", [False, True])
def test_weights_keep_the_form_that_they_were_trained_in(tmp_path: Path, normed: bool) -> None:
    """The weights say it themselves, so that a file will do."""
    model = build("swin_tiny_key", recipe(**{"model.qk_norm": normed}), arguments=SMALL_SWIN).model
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    for checkpoint in (tmp_path, file):
        start = recipe(**{"initialisation.checkpoint": str(checkpoint)})
        assert build("swin_tiny_key", start, arguments=SMALL_SWIN).arguments["qk_norm"] is normed
        with pytest.raises(UserError, match="normalised_heads"):
            build("swin_tiny_key", start.override({"model.qk_norm": not normed}), arguments=SMALL_SWIN)

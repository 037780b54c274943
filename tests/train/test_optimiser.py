"""Optimisers against timm's own, AdamP's projection against timm's, and what is not decayed."""

import copy
import re
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import timm.optim
import torch
from torch import nn

import spatially.models  # noqa: F401  # registers them
from spatially.surgery import add_gaussian_bias
from spatially.train.adamp import AdamP
from spatially.train.optimiser import build_optimiser, undecayed

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))


def trained(optimiser: torch.optim.Optimizer, model: nn.Module, steps: int, update: Any = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        optimiser.zero_grad()
        model(images).square().mean().backward()
        (update or optimiser.step)()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "timms", "options"),
    [
        ("adamw", "adamw", {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("adamp", "adamp", {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("sgd", "momentum", {"momentum": 0.8}),
    ],
)
def test_step_is_that_of_timms_optimiser(name: str, timms: str, options: dict[str, Any]) -> None:
    model = tiny.network(drop=0.0).double()
    other = copy.deepcopy(model)
    changes = {f"optimiser.{key}": list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    recipe = tiny.recipe(**{"optimiser.name": name, "optimiser.weight_decay": 0.3, "optimiser.lr": 0.02}, **changes)
    found = trained(build_optimiser(model, recipe), model, 3)
    whole = timm.optim.create_optimizer_v2(other, opt=timms, lr=0.02, weight_decay=0.3, **options)
    expected = trained(whole, other, 3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_sgd_is_not_nesterovs_unless_asked() -> None:
    plain = build_optimiser(tiny.network(), tiny.recipe(**{"optimiser.name": "sgd"}))
    asked = build_optimiser(tiny.network(), tiny.recipe(**{"optimiser.name": "sgd", "optimiser.nesterov": True}))
    assert [group["nesterov"] for group in plain.param_groups] == [False, False]
    assert [group["nesterov"] for group in asked.param_groups] == [True, True]


class ScaleFree(nn.Module):
    """Weights before batch norms, whose gradients are orthogonal to them by channel, and others whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.Conv2d(5, 4, 3), nn.Flatten())
        self.head = nn.Linear(64, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


@pytest.mark.parametrize("nesterov", [False, True])
def test_adamp_without_waiting_is_timms(nesterov: bool) -> None:
    torch.manual_seed(1)
    model = ScaleFree().double()
    other = copy.deepcopy(model)
    options = {"lr": 0.01, "weight_decay": 0.5, "nesterov": nesterov}
    ours, theirs = AdamP(model.parameters(), **options), timm.optim.AdamP(other.parameters(), **options)

    def both() -> None:
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = two.grad.clone()
        ours.step_without_waiting()
        theirs.step()

    trained(theirs, other, 5, both)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    # the projection must have taken place for some weights and not for others, or this shows nothing
    plain = copy.deepcopy(other)
    undone = trained(timm.optim.AdamP(plain.parameters(), delta=0.0, **options), plain, 1)
    done = trained(timm.optim.AdamP(other.parameters(), **options), other, 1)
    changed = [not torch.equal(*pair) for pair in zip(done, undone, strict=True)]
    assert any(changed)
    assert not all(changed)


def test_positions_norms_and_biases_are_not_decayed() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1), num_heads=(3, 6)
    )
    add_gaussian_bias(model)
    recipe = tiny.recipe(**{"optimiser.name": "adamw", "optimiser.weight_decay": 0.05})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in build_optimiser(model, recipe).param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            free = parameter.ndim <= 1 or "relative_position_bias_table" in name or "gaussian" in name
            assert group["weight_decay"] == (0.0 if free else 0.05), name


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1}, {"pos_embed", "cls_token"}),
        ("pit_tiny", {"img_size": 64}, {"pos_embed", "cls_token"}),
        ("resnet10t", {}, set()),
    ],
)
def test_undecayed_by_name(name: str, options: dict[str, Any], expected: set[str]) -> None:
    assert expected <= undecayed(timm.create_model(name, **options)) <= expected | {"dist_token", "reg_token"}


@pytest.mark.parametrize(
    ("name", "options", "free"),
    [
        ("vit_small_relposmlp", {"img_size": 32, "embed_dim": 16, "num_heads": 2}, r".*\.rel_pos\.mlp\.fc[12]\.weight"),
        ("swin_tiny", {"img_size": 32, "embed_dim": 8, "depths": (1,), "num_heads": (1,)}, r".*position.*"),
        ("convit_tiny", {"embed_dim": 16}, r"cls_token|pos_embed|blocks\.0\.attn\.pos_proj\.weight"),
    ],
)
def test_positions_are_not_decayed_whatever_the_model_says_of_them(
    name: str, options: dict[str, Any], free: str
) -> None:
    model = timm.create_model(name, **({"depth": 1} if "depths" not in options else {}), **options)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recipe = tiny.recipe(**{"optimiser.name": "adamw", "optimiser.weight_decay": 0.05})
    found: dict[float, list[str]] = {}
    for group in build_optimiser(model, recipe).param_groups:
        found.setdefault(group["weight_decay"], []).extend(names[id(one)] for one in group["params"] if one.ndim > 1)
    assert found[0.0]
    assert all(re.fullmatch(free, one) for one in found[0.0])
    assert not any(re.fullmatch(free, one) for one in found[0.05])

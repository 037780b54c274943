"""The flat ResNet-50: one grid, one width, timm's bottlenecks."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from spatially.errors import UserError
from spatially.models.resnet import FlatResNet, checkpoint_filter


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def macs(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as count:
        model.eval()(torch.zeros(1, 3, 224, 224, device="meta"))
    return count.get_total_flops() // 2


@pytest.mark.parametrize("width", [16, 64, 256, 512])
def test_cost_follows_the_width(width: int) -> None:
    model = timm.create_model("resnet50_flat", base_width=width, device="meta")
    assert macs(model) == 55_272 * width**2 + 464_992 * width


def test_default_costs_what_its_pair_costs() -> None:
    flat, pooled = (timm.create_model(name, device="meta") for name in ("resnet50_flat", "resnet50"))
    assert 1 <= macs(flat) / macs(pooled) < 1.04
    blocks = [len(flat.get_submodule(name)) for name in flat.stages]
    assert blocks == [len(pooled.get_submodule(name)) for name in flat.stages] == [3, 4, 6, 3]
    assert all(
        layer.stride == (1, 1)
        for name in flat.stages
        for layer in flat.get_submodule(name).modules()
        if isinstance(layer, nn.Conv2d)
    )


@pytest.mark.parametrize(("size", "grid"), [((224, 224), (14, 14)), ((64, 97), (4, 7)), ((15, 33), (1, 3))])
def test_features(size: tuple[int, int], grid: tuple[int, int]) -> None:
    model = timm.create_model("resnet50_flat", base_width=8, features_only=True).eval()
    assert model.feature_info.reduction() == [16] * 5
    assert model.feature_info.channels() == [8, 32, 32, 32, 32]
    assert [tuple(one.shape[1:]) for one in model(images(*size))] == [(8, *grid)] + [(32, *grid)] * 4
    fewer = timm.create_model("resnet50_flat", base_width=8, features_only=True, out_indices=(0, 2))
    assert {name.split(".")[1] for name, _ in fewer.named_parameters()} == {"stem", "layer1", "layer2"}


def test_stages_are_timms_at_equal_weights() -> None:
    """timm's first stage has no stride either: at base width 64 its blocks 2 and 3 are ours."""
    ours, theirs = FlatResNet(base_width=64).double().eval(), timm.create_model("resnet50").double().eval()
    ours.layer1[1:].load_state_dict(theirs.layer1[1:].state_dict())
    given = torch.randn(1, 256, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(ours.layer1[1:](given), theirs.layer1[1:](given))


def test_head_is_the_mean_over_places() -> None:
    model = FlatResNet(base_width=8, num_classes=5).eval()
    features, maps = model.forward_intermediates(images(64, 48))
    torch.testing.assert_close(model(images(64, 48)), model.fc(features.mean((2, 3))))
    torch.testing.assert_close(maps[-1], features)
    model.reset_classifier(3)
    assert model(images(64, 48)).shape == (2, 3)
    assert not model.get_classifier().training
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images(64, 48)), features)


def test_checkpointing_changes_nothing_not_even_running_statistics() -> None:
    states, gradients = [], []
    for enable in (False, True):
        torch.manual_seed(0)
        model = FlatResNet(base_width=8, depths=(1, 2, 1, 1), num_classes=5, zero_init_last=False, drop_path_rate=0.2)
        model.set_grad_checkpointing(enable)
        model(images(64, 64)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        states.append(dict(model.named_buffers()))
        assert all(norm.momentum == 0.1 for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*states)


def test_checkpoint_and_mistakes() -> None:
    model = FlatResNet(base_width=4)
    model.load_state_dict(checkpoint_filter({"model": model.state_dict()}, model))  # type: ignore[dict-item]
    with pytest.raises(UserError, match="base_width"):
        FlatResNet(base_width=3)
    with pytest.raises(UserError, match=r"\(batch, 3, height, width\)"):
        model(images(32, 32)[:, :2])

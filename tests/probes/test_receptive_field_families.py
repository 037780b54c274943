"""Receptive fields and positions of one small network of every family, whoever wrote it."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spatially
from spatially.errors import NotApplicable
from spatially.observe.feature_map import feature_map
from spatially.probes import PositionBias, ReceptiveField

FAMILIES = run_path(str(Path(__file__).parent.parent / "observe" / "families.py"))["FAMILIES"]
WITHOUT_POSITIONS = {
    *(f"timm {name}" for name in ("convnext", "resnet", "resnext", "regnet", "efficientnet", "mobilenetv3", "mvitv2")),
    *("torchvision resnet50", "torchvision convnext_tiny", "hf ConvNext"),
    *("own swin_tiny_key", "own swin_tiny_r", "own swin_tiny_m", "own resnet_flat"),
}


def loaded(name: str) -> tuple[spatially.Subject, spatially.data.Images]:
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build().eval()
    for module in model.modules():
        if "Norm" in type(module).__name__:  # unequal, or the mean over channels says nothing after a norm
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, 1.0, 0.3)
    subject = spatially.load(model, name=name, input_size=family.size, device="cpu", dtype="float64")
    pixels = np.random.default_rng(0).integers(0, 256, (2, family.size, family.size, 3), dtype=np.uint8)
    return subject, spatially.open_images(pixels, subject, labels=np.zeros(2, dtype=int))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family(name: str) -> None:
    """The field by finite differences of the target along a random direction; its sum; and what positions there are."""
    subject, images = loaded(name)
    probe = ReceptiveField(style="luo")
    _, (row, column) = probe.target(subject)
    shown = torch.from_numpy(images.pixels).double() / 255
    fields, _ = probe.fields(subject, shown, row, column)
    direction = torch.randn(1, 1, *shown.shape[2:], dtype=torch.float64)
    # The field is the mean over colours of the gradient by the normalised image: a grey step in it, too small to cross
    # the kinks of many ReLUs.
    step = 1e-7 * direction * torch.tensor(subject.preprocessing.std, dtype=torch.float64).view(3, 1, 1)
    ahead, behind = (_targets(subject, shown + sign * step, row, column) for sign in (1, -1))
    found = (fields * direction[:, 0]).sum((1, 2))
    scale = float(fields.square().sum((1, 2)).sqrt().max())
    torch.testing.assert_close(found, (ahead - behind) / 2e-7 / 3, rtol=1e-3, atol=1e-4 * scale)
    kim = ReceptiveField().measure(subject, images, np.arange(2))
    torch.testing.assert_close(torch.from_numpy(kim.total.values.sum((0, 1))), fields.relu().sum(0))
    biases = PositionBias(fresh=False)
    if name in WITHOUT_POSITIONS:
        with pytest.raises(NotApplicable, match=f"{name} has no position embedding and no position bias"):
            biases.check(subject, images)
    else:
        maps = biases.measure(subject, images, np.arange(1))
        assert set(maps.kind.values) <= {"absolute", "relative", "gaussian", "relative+gaussian"}
        assert np.isfinite(maps.bias.values).any((1, 2)).all()


def _targets(subject: spatially.Subject, images: Tensor, row: int, column: int) -> Tensor:
    look = feature_map(subject)
    with torch.no_grad(), look:
        subject(images)
    ((_, map),) = look
    return map[:, :, row, column].mean(1)

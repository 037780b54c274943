"""Which parameters hold positions, over families that keep them in different places."""

import pytest
import timm
import torch
import torchvision

from spatially.observe.position_parameters import position_parameters
from spatially.surgery.hosts import find

TIMM = {
    "vit_tiny_patch16_224": {"pos_embed"},
    "deit_tiny_distilled_patch16_224": {"pos_embed"},
    "resnet10t": set(),
    "convnext_atto": set(),
    "pit_ti_224": {"pos_embed"},
    "hiera_tiny_224": {"pos_embed"},
    "crossvit_tiny_240": {"pos_embed_0", "pos_embed_1"},
    "tnt_s_legacy_patch16_224": {"pixel_pos", "patch_pos"},
}
ENDS = {
    "swin_tiny_patch4_window7_224": "relative_position_bias_table",
    "vit_relpos_small_patch16_224": tuple(f"rel_pos.mlp.fc{n}.{part}" for n in (1, 2) for part in ("weight", "bias")),
    "levit_128s": "attention_biases",
    "swinv2_tiny_window8_256": ("cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight"),
    "mvitv2_tiny": ("rel_pos_h", "rel_pos_w"),
}


@pytest.mark.parametrize("name", TIMM)
def test_embeddings(name: str) -> None:
    with torch.device("meta"):
        assert position_parameters(timm.create_model(name)) == TIMM[name]


@pytest.mark.parametrize("name", ENDS)
def test_biases_of_every_layer(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found = position_parameters(model)
    wanted = {one for one, _ in model.named_parameters() if one.endswith(ENDS[name])}
    assert found == wanted
    assert len(found) >= 4


def test_torchvision_and_what_surgery_knows() -> None:
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
        swin = torchvision.models.swin_t()
    assert position_parameters(model) == {"encoder.pos_embedding"}
    known = {name for host in find(swin) for position in host.positions() for name in position.names}
    assert known
    assert position_parameters(swin) == known

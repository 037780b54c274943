import argparse
import os
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from spatially.errors import UserError
from spatially.subject.checkpoint import load_checkpoint, read_checkpoint


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def weights():
    return {name: torch.rand_like(value.float()).to(value.dtype) for name, value in small().state_dict().items()}


def same(model, weights):
    return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: {"state_dict": weights, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda weights: {"model": weights, "optimizer": {"state": {}}},
        lambda weights: {"model_ema": weights, "model": {}},
        lambda weights: {"state_dict_ema": weights, "state_dict": {}},
        lambda weights: {"module." + name: value for name, value in weights.items()},
        lambda weights: {"state_dict": {"model._orig_mod." + name: value for name, value in weights.items()}},
        lambda weights: {"model_ema": {"module": weights}},
    ],
)
def test_wrapped_weights_are_found(tmp_path, weights, wrap):
    torch.save(wrap(weights), tmp_path / "weights.pth")
    model = small()
    load_checkpoint(model, tmp_path / "weights.pth")
    assert same(model, weights)


def test_safetensors(tmp_path, weights):
    save_file(weights, tmp_path / "weights.safetensors")
    model = small()
    load_checkpoint(model, tmp_path / "weights.safetensors")
    assert same(model, weights)


class Malicious:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_code_is_refused_and_not_run(tmp_path):
    torch.save({"state_dict": Malicious(tmp_path / "ran")}, tmp_path / "zip.pth")
    torch.save(Malicious(tmp_path / "ran"), tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    for protocol in (2, 4):
        (tmp_path / f"raw{protocol}.pth").write_bytes(pickle.dumps(Malicious(tmp_path / "ran"), protocol=protocol))
    for name in ("zip.pth", "legacy.pth", "raw2.pth", "raw4.pth"):
        with pytest.raises(UserError, match=rf"{name} wants to run code when opened and was refused.*safetensors"):
            read_checkpoint(tmp_path / name)
    torch.save(small(), tmp_path / "module.pth")
    with pytest.raises(UserError, match=r"refused.*torch\.nn\.modules"):
        read_checkpoint(tmp_path / "module.pth")
    (tmp_path / "weights.safetensors").write_bytes((tmp_path / "zip.pth").read_bytes())
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        read_checkpoint(tmp_path / "weights.safetensors")
    assert not (tmp_path / "ran").exists()


def test_missing_and_damaged_files(tmp_path, weights):
    with pytest.raises(UserError, match=r"there is no file .*none\.pth"):
        read_checkpoint(tmp_path / "none.pth")
    torch.save(weights, tmp_path / "whole.pth")
    save_file(weights, tmp_path / "whole.safetensors")
    damaged = {
        "half.pth": (tmp_path / "whole.pth").read_bytes()[:500],
        "half.safetensors": (tmp_path / "whole.safetensors").read_bytes()[:-10],
        "empty.pth": b"",
        "empty.safetensors": b"",
        "text.pth": b"<html>not found</html>" * 50,
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is damaged or not a"):
            read_checkpoint(tmp_path / name)


def test_files_without_weights(tmp_path):
    for content in ({"epoch": 3}, [1, 2], torch.zeros(3)):
        torch.save(content, tmp_path / "none.pth")
        with pytest.raises(UserError, match="holds no weights by name"):
            read_checkpoint(tmp_path / "none.pth")


def test_differences_are_listed(tmp_path, weights):
    del weights["0.bias"], weights["1.running_mean"]
    weights["0.weight"] = torch.zeros(7, 3)
    weights |= {f"extra.{number:02}": torch.zeros(1) for number in range(20)}
    torch.save(weights, tmp_path / "other.pth")
    with pytest.raises(UserError) as caught:
        load_checkpoint(small(), tmp_path / "other.pth")
    message = str(caught.value)
    assert "2 missing: 0.bias, 1.running_mean;" in message
    assert "20 not in the model: extra.00" in message
    assert "extra.07, …" in message
    assert "extra.08" not in message
    assert "1 of another shape: 0.weight [7, 3] instead of [4, 3]" in message


def test_a_model_that_does_not_fit_is_left_alone(tmp_path, weights):
    model, before = small(), small()
    before.load_state_dict(model.state_dict())
    torch.save({**weights, "extra": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError):
        load_checkpoint(model, tmp_path / "other.pth")
    assert same(model, before.state_dict())


def test_published_names_go_through_timms_filter(tmp_path):
    options = {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3}
    large = timm.create_model("vit_tiny_patch16_224", **options)
    torch.save(large.state_dict(), tmp_path / "vit.pth")
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, **options)  # its table of positions is smaller
    load_checkpoint(model, tmp_path / "vit.pth")
    assert torch.equal(model.head.weight, large.head.weight)
    assert model.pos_embed.shape == (1, 37, 24)


def test_a_part_that_is_kept_stays_as_it_is(tmp_path):
    saved = timm.create_model("resnet10t", num_classes=3)
    save_file(saved.state_dict(), tmp_path / "resnet.safetensors")
    model = timm.create_model("resnet10t", num_classes=5)
    head = model.fc.weight.clone()
    load_checkpoint(model, tmp_path / "resnet.safetensors", keep=["fc"])
    assert torch.equal(model.fc.weight, head)
    assert torch.equal(model.conv1[0].weight, saved.conv1[0].weight)
    with pytest.raises(UserError, match="does not fit the model"):
        load_checkpoint(model, tmp_path / "resnet.safetensors")


@pytest.mark.parametrize("content", [b"", b"junk junk", b"\x80\x02junk", b"h1234"])
def test_what_is_no_weights_file_is_said_in_words(tmp_path, content):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"weights\.pth is damaged or not a weights file$"):
        read_checkpoint(path)

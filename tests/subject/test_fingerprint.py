import hashlib

import torch
from torch import nn

from spatially.subject.fingerprint import Fingerprint


def test_is_blake2b_of_names_shapes_types_and_bytes():
    model = nn.Linear(2, 1)
    expected = hashlib.blake2b(digest_size=16)
    expected.update(b"bias [1] torch.float32;" + model.bias.detach().numpy().tobytes())
    expected.update(b"weight [1, 2] torch.float32;" + model.weight.detach().numpy().tobytes())
    assert Fingerprint(model).hexadecimal == expected.hexdigest()


def test_changes_with_the_weights_and_not_with_the_layout():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = Fingerprint(model).hexadecimal
    assert Fingerprint(model.to(memory_format=torch.channels_last)).hexadecimal == before
    assert Fingerprint(model.bfloat16()).hexadecimal != before
    model.float()
    with torch.no_grad():
        model[1].running_mean[0] += 1
    assert Fingerprint(model).hexadecimal != before

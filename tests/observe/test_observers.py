"""Observers of every kind: several at once, of models that are checkpointed, random or partly scripted."""

import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from runpy import run_path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import spatially
from spatially.errors import NotApplicable
from spatially.observe import attention, feature_map, stream

Networks = run_path(str(Path(__file__).with_name("networks.py")))
subject_of, pictures = Networks["subject_of"], Networks["pictures"]
OBSERVERS = [attention, stream, feature_map]


@pytest.mark.parametrize(("one", "other"), itertools.product(OBSERVERS, OBSERVERS))
def test_observers_of_every_kind_at_once_see_what_they_see_alone(one, other):
    images = pictures(64)
    alone = []
    for observer in (one, other):
        subject = subject_of("timm vit")  # nothing is known of it yet
        with torch.no_grad(), observer(subject) as seen:
            subject(images)
        alone.append([value for _, value in seen])
    subject = subject_of("timm vit")
    with torch.no_grad(), one(subject) as first, other(subject) as second:
        subject(images)
    for seen, expected in zip((first, second), alone, strict=True):
        assert len(expected)
        assert all(map(torch.equal, (value for _, value in seen), expected))


def test_checkpointed_models_are_watched_with_gradients():
    subject, images = subject_of("timm vit"), pictures(64)
    expected = subject(images)
    grads = torch.autograd.grad(expected.square().sum(), list(subject.model.parameters()))
    checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    subject.model.blocks = nn.Sequential(*subject.model.blocks)
    plain = subject.model.blocks.forward
    subject.model.blocks.forward = lambda x: checkpoint(plain, x)
    with attention(subject) as seen:
        watched = subject(images)
    assert len(seen) == 2
    assert torch.equal(watched, expected)
    found = torch.autograd.grad(watched.square().sum(), list(subject.model.parameters()))
    assert all(map(torch.equal, found, grads))


def test_models_are_watched_inside_a_transform():
    subject, images = subject_of("timm vit"), pictures(64)
    seen = []
    with attention(subject, lambda layer, weights: seen.append(layer.name)):
        slope = torch.func.grad(lambda pixels: subject(pixels).square().sum())(images)
    assert len(seen) == 2
    leaf = images.clone().requires_grad_()
    torch.testing.assert_close(slope, torch.autograd.grad(subject(leaf).square().sum(), leaf)[0])


def test_no_random_numbers_are_taken_from_those_to_come():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = subject_of("timm vit").model

        def forward(self, images):
            return self.inner(images + 0.1 * torch.randn_like(images))

    answers = []
    for observer in (None, attention, stream, feature_map):
        subject = spatially.load(Noisy(), name="noisy", input_size=64, device="cpu", num_classes=None)
        subject.model.inner.load_state_dict(subject_of("timm vit").model.state_dict())
        torch.manual_seed(0)
        with torch.no_grad(), observer(subject) if observer else nullcontext():
            answers.append(subject(pictures(64)))
    assert all(torch.equal(one, answers[0]) for one in answers)


@pytest.mark.parametrize("script", [torch.jit.script, lambda one: torch.jit.trace(one, torch.rand(2, 8, 8, 8))])
@pytest.mark.parametrize("observer", [attention, stream, feature_map])
def test_scripts_hide_as_parts_too(observer, script):
    part = script(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()))
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), part, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    subject = spatially.load(model, name="script", input_size=32, device="cpu", num_classes=4)
    with pytest.raises(NotApplicable, match="TorchScript"), torch.no_grad(), observer(subject):
        subject(pictures(32))

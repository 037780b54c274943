import json

import pytest
import torch
from torch import nn

import spatially.subject.subject
from spatially.errors import UserError
from spatially.models.calibrators import BagOfPatches
from spatially.subject import Preprocessing, Subject
from spatially.subject.classes import ClassNames
from spatially.subject.patches import patch_side

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


class Small(nn.Module):
    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)
        self.wrap = wrap

    def forward(self, images):
        return self.wrap(self.drop(self.head(self.convolution(images).relu().mean((2, 3)))))


def subject_of(model, **options):
    preprocessing = Preprocessing((8, 8), resize=(8, 8), mean=MEAN, std=STD)
    return Subject(model, preprocessing, **{"name": "small", "answers": 4, "device": torch.device("cpu"), **options})


@pytest.fixture
def images():
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def expected(model, images):
    normalised = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return model.eval()(normalised)


def test_normalises_once_and_runs_in_eval_mode(images):
    assert torch.equal(subject_of(Small())(images), expected(Small(), images))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: (logits, logits + 1),
        lambda logits: {"features": logits + 1, "logits": logits},
        lambda logits: {"out": logits, "aux": logits + 1},
        lambda logits: [None, logits],
        lambda logits: type("Output", (), {"logits": logits})(),
    ],
)
def test_finds_the_logits_in_what_a_model_returns(images, wrap):
    assert torch.equal(subject_of(Small(wrap))(images), expected(Small(), images))


@pytest.mark.parametrize("wrap", [lambda logits: "cat", lambda logits: logits[0], lambda logits: logits[..., None]])
def test_other_answers_are_refused(images, wrap):
    with pytest.raises(UserError, match="must"):
        subject_of(Small(wrap))(images)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 8, 8), torch.zeros(1, 1, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)]
)
def test_wrong_images_are_named(wrong):
    with pytest.raises(ValueError, match=r"images: must be floating point of shape .* got torch\.\w+ of shape \("):
        subject_of(Small())(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_autocast(images, dtype):
    subject = subject_of(Small(), dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        reference = expected(Small(), images)
    assert reference.dtype == dtype
    assert subject(images).dtype == torch.float32
    assert torch.equal(subject(images), reference.float())
    assert next(subject.model.parameters()).dtype == torch.float32


def test_double_precision(images):
    subject = subject_of(Small(), dtype=torch.float64)
    logits = subject(images)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), expected(Small(), images))


def test_computing_in_double_precision_normalises_in_it(images):
    found = subject_of(Small()).computing_in(torch.float64).normalise(images)
    wanted = torch.stack([(images[:, c].double() - MEAN[c]) / STD[c] for c in range(3)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found, subject_of(Small(), dtype=torch.float64).normalise(images), rtol=0, atol=0)


def test_channels_last_changes_only_the_layout(images):
    subject = subject_of(Small(), channels_last=True)
    assert subject.normalise(images).is_contiguous(memory_format=torch.channels_last)
    assert subject.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(subject(images), expected(Small(), images))


def test_compiles(images, monkeypatch):
    seen = []
    monkeypatch.setattr(spatially.subject.subject.torch, "compile", lambda model: seen.append(model) or model)
    subject = subject_of(Small(), compile=True)
    assert seen == [subject.model]
    assert torch.equal(subject(images), expected(Small(), images))


def test_gradients_reach_the_image(images):
    subject = subject_of(Small())
    images = images.requires_grad_()
    (found,) = torch.autograd.grad(subject(images).sum(), images)
    (reference,) = torch.autograd.grad(expected(Small(), images).sum(), images)
    assert torch.equal(found, reference)
    assert all(parameter.requires_grad for parameter in subject.model.parameters())


def test_alignment_is_a_view(images):
    subject = subject_of(Small(), classes=ClassNames(("a", "b", "c", "d")))
    view = subject.align(["d", "a"], [0, 1])
    assert view.model is subject.model
    assert (view.answers, view.class_names) == (2, ("d", "a"))
    assert (subject.answers, subject.class_names) == (4, ("a", "b", "c", "d"))
    assert torch.equal(view(images), subject(images)[:, [3, 0]])
    assert view.align(["b"], [0]).class_names == ("b",)
    assert view.fingerprint == subject.fingerprint


def test_class_map_decides(images):
    subject = subject_of(Small(), class_map={"x": [0, 1], "y": [2, 3]})
    view = subject.align(["x", "y"], torch.tensor([0, 1]))
    assert view(images).shape == (5, 2)
    probabilities = subject(images).softmax(1)
    torch.testing.assert_close(view(images).softmax(1)[:, 0], probabilities[:, :2].sum(1))


def test_describes_itself_in_plain_values():
    subject = subject_of(Small(), facts={"source": "module"}, class_map={"x": [0, 1], "y": 2})
    facts = json.loads(json.dumps(subject.align(["x", "y"], [0]).describe()))
    assert facts["parameters"] == 3 * 8 * 9 + 8 + 8 * 4 + 4
    assert (facts["model"], facts["source"], facts["dtype"]) == ("small", "module", "float32")
    assert facts["weights_fingerprint"] == subject.fingerprint
    assert (facts["preprocessing"]["mean"], facts["preprocessing"]["input_size"]) == (list(MEAN), [8, 8])
    assert facts["class_mapping"] == "class_map"
    assert json.loads(facts["class_members"]) == {"x": [0, 1], "y": [2]}


@pytest.mark.parametrize(
    ("model", "patch"),
    [
        (nn.Conv2d(3, 8, 16, stride=16), 16),
        (nn.Conv2d(3, 8, 7, stride=2, padding=3), None),
        (nn.Conv2d(3, 8, 4, stride=4, padding=1), None),
        (nn.Conv2d(3, 8, (4, 8), stride=(4, 8)), None),
        (nn.Sequential(nn.Conv2d(8, 8, 2, stride=2)), None),
        (nn.Linear(3, 8), None),
        (BagOfPatches(num_classes=2, patch=6), 6),
    ],
)
def test_patches_are_known_where_they_do_not_overlap(model, patch):
    assert patch_side(model) == patch
    assert subject_of(model).describe().get("patch") == patch


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda(images):
    subject = subject_of(Small(), device=torch.device("cuda", 0), dtype=torch.bfloat16, classes=ClassNames(("a",) * 4))
    view = subject.align(["x", "y", "z", "u"], [0])
    torch.testing.assert_close(view(images).cpu(), expected(Small(), images), atol=3e-2, rtol=3e-2)
    assert subject.fingerprint == subject_of(Small()).fingerprint


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_complex_weights_stay_complex(dtype: str) -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.cfloat))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft2(torch.fft.rfft2(images) * self.filter).flatten(1)

    torch.manual_seed(0)
    model, images = Filter(), torch.rand(2, 3, 8, 8)
    expected = model(images).detach()
    subject = spatially.load(model, name="filter", input_size=8, device="cpu", dtype=dtype)
    torch.testing.assert_close(subject(images).float(), expected)
    other = subject.computing_in(torch.float64 if dtype == "float32" else torch.float32)
    torch.testing.assert_close(other(images).float(), expected)

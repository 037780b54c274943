"""FGSM: inside 0..1 and the ε-ball, exact on a linear loss, and honest where there is no gradient."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.perturb import fgsm
from spatially.perturb.fgsm import check_epsilon, direction, step

PIXELS = 3 * 4 * 4


class Linear(nn.Module):
    """Two logits, w·x and 0. Where w·x is very negative the loss of class 0 is −w·x up to exp(w·x): linear in the pixels."""

    num_classes = 2

    def __init__(self, weight: Tensor, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = weight, offset

    def forward(self, images: Tensor) -> Tensor:
        score = images.flatten(1) @ self.weight + self.offset
        return torch.stack([score, torch.zeros_like(score)], dim=1)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=24),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
def test_never_leaves_the_range_or_the_ball(values: list[float], epsilon: float, dtype: torch.dtype, random) -> None:  # type: ignore[no-untyped-def]
    images = torch.tensor(values, dtype=dtype).view(1, 1, 1, -1)
    signs = torch.tensor([random.choice((-1, 0, 1)) for _ in values], dtype=torch.int8).view_as(images)
    moved = step(images, signs, epsilon=epsilon)
    assert moved.dtype == dtype
    assert moved.min() >= 0
    assert moved.max() <= 1
    for before, sign, after in zip(images.flatten(), signs.flatten(), moved.flatten(), strict=True):
        # exact numbers, so that not one unit in the last place escapes
        exact, target = Fraction(after.item()) - Fraction(before.item()), Fraction(epsilon) * int(sign)
        assert abs(exact) <= Fraction(epsilon)
        assert exact * int(sign) >= 0
        if 0 < before + sign * epsilon < 1 and dtype == torch.float32:
            assert abs(exact - target) < 2e-7


def test_a_linear_loss_rises_by_epsilon_times_the_gradients_absolute_sum() -> None:
    torch.manual_seed(0)
    model = Linear(torch.randn(PIXELS, dtype=torch.float64), offset=-200.0)
    images = torch.rand(5, 3, 4, 4, dtype=torch.float64) * 0.8 + 0.1
    labels = torch.zeros(5, dtype=torch.int64)
    for epsilon in (0.0, 1 / 255, 0.1):
        before, after = (
            functional.cross_entropy(model(one), labels, reduction="none")
            for one in (images, fgsm(model, images, labels, epsilon=epsilon))
        )
        # the gradient of the loss −w·x + log(1 + exp(w·x)) is −w
        assert torch.allclose(
            after - before, torch.full((5,), epsilon * float(model.weight.abs().sum())).double(), atol=1e-10
        )


def test_clipped_pixels_stay_at_the_end() -> None:
    model = Linear(-torch.ones(PIXELS), offset=0.0)
    moved = fgsm(model, torch.ones(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), epsilon=0.1)
    assert (moved == 1).all()


def test_epsilon_zero_is_the_identity(subject: spatially.Subject) -> None:
    images = torch.rand(3, 3, 32, 32)
    assert torch.equal(fgsm(subject, images, torch.tensor([0, 1, 2]), epsilon=0), images)


def test_normalisation_is_the_subjects_own() -> None:
    """The same pixels move, whatever a model makes of them first."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 3))
    images, labels = torch.rand(4, 3, 4, 4), torch.tensor([0, 1, 2, 0])
    subject = spatially.load(
        plain, name="plain", input_size=4, num_classes=3, mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.1], device="cpu"
    )
    moved = fgsm(subject, images, labels, epsilon=0.05)
    pixels = images.clone().requires_grad_()
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.1]).view(3, 1, 1)
    functional.cross_entropy(plain((pixels - mean) / std), labels).backward()
    assert pixels.grad is not None
    expected = (images + 0.05 * pixels.grad.sign()).clamp(0, 1)
    assert torch.allclose(moved, expected, atol=1e-6)


def test_an_image_alone_moves_as_it_does_among_others() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(4, 3)).eval().double()
    images, labels = torch.rand(5, 3, 8, 8).double(), torch.tensor([0, 1, 2, 0, 1])
    together = direction(model, images, labels)
    alone = torch.cat([direction(model, images[i : i + 1], labels[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)


class Tokens(nn.Module):
    """A batch norm whose output is read patch by patch, so that its gradient comes transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 4, stride=4), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.stem(images)).flatten(2).transpose(1, 2)
        return self.head(tokens.reshape(len(images), -1)[:, :4].square())


def test_an_image_alone_moves_as_it_does_among_others_behind_a_transposition() -> None:
    torch.manual_seed(0)
    model = Tokens().eval().double()
    images, labels = torch.rand(5, 3, 16, 8).double(), torch.tensor([0, 1, 2, 0, 1])
    together = direction(model, images, labels)
    alone = torch.cat([direction(model, images[i : i + 1], labels[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)


def test_a_sure_model_still_has_a_gradient() -> None:
    """p = 1 in float32: the gradient there would be 0, and the attack none."""
    model = Linear(torch.ones(PIXELS), offset=20.0)
    signs = direction(model, torch.full((2, 3, 4, 4), 0.1), torch.zeros(2, dtype=torch.int64))
    assert (signs == -1).all()


@pytest.mark.parametrize("margin", [1.0, 40.0, 400.0])
def test_how_sure_a_model_is_has_no_say_in_the_direction(margin: float) -> None:
    """1 − p is 0 in float64 from a margin of 37 on; the gradient is that times (Σ q·w of the others − w of the true class)."""
    torch.manual_seed(0)
    weight, images = torch.randn(3, PIXELS), torch.rand(4, 3, 4, 4)
    offset = margin - (images.flatten(1) @ weight.T)[:, :1]  # the true class is so far above about 0

    def model(shown: Tensor) -> Tensor:
        logits = shown.flatten(1) @ weight.T
        return torch.cat([logits[:, :1] + offset, logits[:, 1:]], dim=1)

    others = (images.flatten(1).double() @ weight[1:].double().T).softmax(dim=1) @ weight[1:].double()
    expected = (others - weight[0].double()).sign().view(4, 3, 4, 4)
    assert torch.equal(direction(model, images, torch.zeros(4, dtype=torch.int64)).double(), expected)


def test_images_and_weights_are_as_before(subject: spatially.Subject) -> None:
    images = torch.rand(2, 3, 32, 32)
    before = images.clone()
    fgsm(subject, images, torch.tensor([0, 1]), epsilon=0.1)
    assert torch.equal(images, before)
    assert not images.requires_grad
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize(
    "model",
    [lambda x: x.detach().mean(dim=(2, 3)), lambda x: torch.zeros(len(x), 3, requires_grad=True)],
    ids=["detached", "unused"],
)
def test_no_gradient_is_said(model) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotApplicable, match="not differentiable"):
        fgsm(model, torch.rand(2, 3, 4, 4), torch.tensor([0, 1]))


def test_a_gradient_that_is_not_finite_is_said() -> None:
    with pytest.raises(UserError, match="not finite"):
        fgsm(lambda x: (x * torch.nan).mean(dim=(2, 3)), torch.rand(2, 3, 4, 4), torch.tensor([0, 1]))


def test_epsilon_as_a_fraction() -> None:
    assert check_epsilon("4/255") == 4 / 255
    for wrong in (-0.1, 1.5, "a", "1/0", True, None, float("nan")):
        with pytest.raises(UserError, match="epsilon"):
            check_epsilon(wrong)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_same_bits_on_the_gpu() -> None:
    images, signs = torch.rand(4, 3, 16, 16), torch.randint(-1, 2, (4, 3, 16, 16), dtype=torch.int8)
    assert torch.equal(step(images, signs, epsilon=1 / 255), step(images.cuda(), signs.cuda(), epsilon=1 / 255).cpu())

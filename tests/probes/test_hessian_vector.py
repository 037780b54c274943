"""Products with the Hessian against dense ones, the attention paths, and what cannot be differentiated twice."""

import contextlib

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jvp
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.probes.hessian_vector import HessianVector, only_these_learn, select_parameters, twice_differentiable


def dense(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Every seventh row of the Hessian by torch.func, forward over reverse, in the order of the parameters.

    Row by row, and not by ``torch.func.hessian``: under ``vmap`` PyTorch 2.15 has second derivatives wrong for the weights of
    layer norms (that Hessian is not symmetric there, and disagrees with differences of gradients).
    """
    named = {name: one.detach() for name, one in model.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([one.numel() for one in named.values()])
        given = {name: part.view_as(one) for (name, one), part in zip(named.items(), parts, strict=True)}
        return cross_entropy(functional_call(model, given, (images,)), labels)

    with twice_differentiable():
        flat = torch.cat([one.reshape(-1) for one in named.values()])
        return torch.stack([jvp(grad(loss), (flat,), (row,))[1] for row in torch.eye(len(flat), dtype=flat.dtype)[::7]])


def built(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The same, column by column from products."""
    with twice_differentiable():
        product = HessianVector(cross_entropy(model(images), labels), list(model.parameters()))
        identity = torch.eye(product.dimension, dtype=images.dtype)
        return torch.stack([product(row) for row in identity])


def sizes(model: nn.Module) -> list[int]:
    return [one.numel() for one in model.parameters()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.unfold(3, 2, 2).permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2)
        return self.head(self.inner(tokens).mean(1))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "relu": nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ),
        "vit": timm.models.VisionTransformer(
            img_size=16, patch_size=4, embed_dim=4, depth=1, num_heads=2, mlp_ratio=2, num_classes=3
        ),
        "encoder": Attention(),
    }


@pytest.mark.parametrize("name", ["relu", "vit", "encoder"])
def test_against_the_dense_hessian(name: str) -> None:
    model = networks()[name].double().eval()
    with torch.no_grad():  # away from where weights begin: class tokens near 0 are all but singular before a norm
        for one in model.parameters():
            one += 0.2 * torch.randn_like(one)
    side = 16 if name == "vit" else 8
    images, labels = torch.rand(4, 3, side, side).double(), torch.tensor([0, 1, 2, 1])
    found, truth = built(model, images, labels), dense(model, images, labels)
    torch.testing.assert_close(found[::7], truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, found.T, rtol=1e-9, atol=1e-12)
    assert truth.abs().max() > 1e-3
    parameters, step = list(model.parameters()), 1e-6
    vector = torch.randn(len(found), dtype=torch.float64)
    slopes = []
    with twice_differentiable():
        for sign in (1, -2):
            with torch.no_grad():
                torch._foreach_add_(
                    parameters,
                    [part.view_as(one) for one, part in zip(parameters, vector.split(sizes(model)), strict=True)],
                    alpha=sign * step,
                )
            gradients = torch.autograd.grad(cross_entropy(model(images), labels), parameters)
            slopes.append(torch.cat([one.reshape(-1) for one in gradients]))
    torch.testing.assert_close(found @ vector, (slopes[0] - slopes[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_unused_and_linear_parameters_have_zeros() -> None:
    used, unused, linear = (torch.rand(2, requires_grad=True) for _ in range(3))
    product = HessianVector((used**3).sum() + linear.sum(), [used, unused, linear])
    expected = torch.cat([6 * used.detach(), torch.zeros(4)])
    torch.testing.assert_close(product(torch.ones(6)), expected)
    assert not HessianVector(linear.sum(), [linear])(torch.ones(2)).any()


def test_settings_come_back() -> None:
    query = torch.rand(1, 1, 4, 8, requires_grad=True)
    torch.backends.cudnn.deterministic = False
    before = torch.get_float32_matmul_precision(), torch.backends.mha.get_fastpath_enabled()
    with contextlib.suppress(KeyError), twice_differentiable():
        HessianVector(scaled_dot_product_attention(query, query, query).square().sum(), [query])(torch.ones(32))
        assert not torch.backends.mha.get_fastpath_enabled()
        raise KeyError
    assert before == (torch.get_float32_matmul_precision(), torch.backends.mha.get_fastpath_enabled())
    assert not torch.backends.cudnn.deterministic
    with pytest.raises(NotApplicable, match=r"no second derivative: aten::_scaled_dot_product_flash\w+ cannot"):
        HessianVector(scaled_dot_product_attention(query, query, query).square().sum(), [query])(torch.ones(32))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context, value):  # type: ignore[no-untyped-def]
        context.save_for_backward(value)
        return value**3

    @staticmethod
    @once_differentiable
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        return 3 * context.saved_tensors[0] ** 2 * gradient


def test_a_function_differentiable_once_is_named() -> None:
    weight = torch.rand(2, 3, requires_grad=True)
    with pytest.raises(NotApplicable, match="Cube cannot be differentiated twice"):
        HessianVector(cross_entropy(Cube.apply(weight * 2), torch.tensor([0, 1])), [weight])


def test_reentrant_checkpoints_are_named() -> None:
    weight = torch.rand(2, 3, requires_grad=True)
    inner = torch.utils.checkpoint.checkpoint(torch.exp, weight * 2, use_reentrant=True)
    with pytest.raises(NotApplicable, match="checkpoint"):
        HessianVector(cross_entropy(inner, torch.tensor([0, 1])), [weight])


def test_regular_attention_takes_part() -> None:
    """Our fused operation falls back to a path that can be differentiated twice: the answer is that path's own."""
    model = spatially.nn.RegularSelfAttention(8, 2, window_size=3).double()
    head = nn.Linear(8, 3).double()
    images = torch.rand(2, 5, 5, 8).double()

    def loss() -> Tensor:
        return cross_entropy(head(model(images).mean((1, 2))), torch.tensor([0, 2]))

    parameters = [*model.parameters(), *head.parameters()]
    with twice_differentiable():
        product = HessianVector(loss(), parameters)
        vector = torch.randn(product.dimension).double()
        found = product(vector)
        step, moved = 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                for one, part in zip(parameters, vector.split(product.sizes), strict=True):
                    one += sign * step * part.view_as(one)
            moved.append(torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss(), parameters)]))
            with torch.no_grad():
                for one, part in zip(parameters, vector.split(product.sizes), strict=True):
                    one -= sign * step * part.view_as(one)
    torch.testing.assert_close(found, (moved[0] - moved[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_parameters_by_name() -> None:
    model = networks()["vit"]
    assert set(select_parameters(model, ["head.*"])) == {"head.weight", "head.bias"}
    assert len(select_parameters(model)) == len(list(model.parameters()))
    with pytest.raises(UserError, match=r"unknown parameter 'heads\.\*': did you mean 'head\.\w+'"):
        select_parameters(model, ["*.bias", "heads.*"])
    with pytest.raises(
        UserError, match=r"names: cls_token, pos_embed, patch_embed\.\*, blocks\.\*, norm\.\*, head\.\*\)"
    ):
        select_parameters(model, ["zzz"])
    with pytest.raises(NotApplicable, match="no parameters"):
        select_parameters(nn.Flatten())
    model.head.weight.requires_grad_(False)
    with only_these_learn(model, [model.head.weight]):
        assert [name for name, one in model.named_parameters() if one.requires_grad] == ["head.weight"]
    assert not model.head.weight.requires_grad
    assert model.head.bias.requires_grad

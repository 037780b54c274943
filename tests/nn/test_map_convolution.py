"""The convolution of maps as they lie is PyTorch's, also as the operation that compiled graphs hold."""

import pytest
import torch
import torch.nn.functional as F

from spatially.nn.map_convolution import convolution, convolve_map


def inputs(groups: int = 1, *, bias: bool = True, gradient: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=gradient)
    weight = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64, requires_grad=gradient)
    return x, weight, torch.randn(4, dtype=torch.float64, requires_grad=gradient) if bias else None


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_both_ways_are_the_convolution(groups, bias):
    x, weight, offset = inputs(groups, bias=bias)
    expected = F.conv2d(x.permute(0, 3, 1, 2), weight, offset, padding=1, groups=groups).permute(0, 2, 3, 1)
    for convolve in (convolve_map, convolution):
        found = convolve(x, weight, offset, groups)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_its_derivative(groups, bias):
    given = inputs(groups, bias=bias, gradient=True)
    assert torch.autograd.gradcheck(lambda *tensors: convolution(*tensors, groups), given)
    torch.library.opcheck(convolution, (*given, groups))


def test_it_differentiates_only_what_is_asked():
    x, weight, bias = inputs()
    convolution(x, weight.requires_grad_(), bias, 1).sum().backward()
    assert weight.grad is not None
    assert x.grad is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_compiled_layer_on_a_gpu_is_the_plain_one():
    from spatially.nn import ConvProjection

    torch.manual_seed(0)
    layer = ConvProjection(64).cuda()
    x = torch.randn(2, 14, 14, 64, device="cuda", requires_grad=True)
    found = {}
    for name, run in (("plain", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            parts = run(x)
        gradients = torch.autograd.grad(sum(part.float().square().sum() for part in parts), [x, *layer.parameters()])
        found[name] = [*parts, *gradients]
    for one, other in zip(found["plain"], found["compiled"], strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2 * float(one.abs().max()))

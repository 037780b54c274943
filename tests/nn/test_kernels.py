"""The Triton kernels against the definition: in Triton's interpreter without a GPU, compiled with one."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spatially.nn.regular_attention import BORDERS, packed_regular_attention, regular_attention
from spatially.nn.regular_attention.projections import unpack

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def release(module: ModuleType) -> tuple[int, ...]:
    return tuple(int(number) for number in module.__version__.split(".")[:2])


pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and release(triton) < (3, 7) and release(np) >= (2, 4),
    reason="the interpreter of Triton 3.6 takes no numbers of NumPy 2.4: install numpy<2.4, or a newer PyTorch",
)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def relative(measured: Tensor, expected: Tensor) -> float:
    """Relative error; a gradient that is 0, or all but, is compared with the unit size of the inputs."""
    measured, expected = measured.detach().double(), expected.detach()
    return float((measured - expected).norm() / max(expected.norm(), 0.1 * expected.numel() ** 0.5))


def compare(shape: tuple[int, ...], *, window: int, border: str, biased: bool, dtype: torch.dtype) -> list[float]:
    """Relative errors of the output and of every gradient, against the reference in float64."""
    inputs = [draw(*shape, dtype=dtype, seed=seed) for seed in range(3)]
    inputs += [draw(shape[3], window, window, seed=3)] if biased else []
    slope = draw(*shape, dtype=dtype, seed=4).detach()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for tensors, backend in ((inputs, "triton"), (exact, "reference")):
        out = regular_attention(
            *tensors[:3], window=window, border=border, bias=tensors[3] if biased else None, backend=backend
        )
        results.append([out, *torch.autograd.grad(out, tensors, slope.to(out.dtype))])
    return [relative(*pair) for pair in zip(*results, strict=True)]


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [3, 7])
def test_values_and_gradients(border, biased, window):
    assert max(compare((1, 5, 9, 2, 16), window=window, border=border, biased=biased, dtype=torch.float32)) < 1e-5


@pytest.mark.parametrize(("window", "size"), [(5, 24), (9, 16), (13, 40)])
def test_other_windows_and_sizes(window, size):
    assert max(compare((1, 4, 6, 1, size), window=window, border="mask", biased=True, dtype=torch.float32)) < 1e-5


@pytest.mark.parametrize(
    ("height", "width", "window", "border"),
    [
        (5, 12, 7, "mask"),  # slim tiles at the right edge
        (5, 13, 7, "mask"),  # too wide for them
        (5, 12, 7, "zero"),  # beyond which there is something
        (5, 12, 3, "mask"),
        (3, 20, 9, "shift"),  # keys near the border are seen from far
        (3, 36, 13, "shift"),
    ],
)
def test_edges(height, width, window, border):
    assert (
        max(compare((1, height, width, 1, 16), window=window, border=border, biased=False, dtype=torch.float32)) < 1e-5
    )


@pytest.mark.parametrize(("size", "dtype", "tolerance"), [(18, torch.float32, 1e-5), (12, torch.float16, 1e-3)])
def test_sizes_that_no_descriptor_reads(size, dtype, tolerance):
    assert max(compare((1, 4, 5, 2, size), window=3, border="mask", biased=True, dtype=dtype)) < tolerance


def test_what_was_made_in_inference_mode_beside_a_bias_that_learns():
    with torch.inference_mode():
        maps = [draw(1, 4, 5, 1, 16, seed=seed).detach() for seed in range(3)]
        packed = torch.stack(maps, dim=3)
    bias = draw(1, 3, 3, seed=3)
    outs = [
        regular_attention(*maps, window=3, bias=bias, backend="triton"),
        packed_regular_attention(packed, window=3, bias=bias, backend="triton"),
        regular_attention(*maps, window=3, bias=bias, backend="tiled"),
    ]
    slopes = [torch.autograd.grad(out.square().sum(), bias)[0] for out in outs]
    for slope in slopes[:2]:
        torch.testing.assert_close(slope, slopes[2], rtol=1e-4, atol=1e-5)


def test_a_batch_larger_than_a_launch_goes_in_pieces(monkeypatch):
    from spatially.nn.regular_attention import operations

    monkeypatch.setattr(operations, "LARGEST_BATCH", 2)
    assert max(compare((5, 4, 5, 1, 16), window=3, border="mask", biased=True, dtype=torch.float32)) < 1e-5


def test_what_was_compiled_keeps_no_tensor_of_its_first_call():
    from spatially.nn.regular_attention.launch import TensorDescriptor, _Compiled

    def block(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 16])

    calls = []
    query, key = draw(2, 16), draw(2, 16)
    compiled = _Compiled(lambda *given: calls.append(given), [query, block(key), block(key), 7], 2, {1: 1, 2: 1})
    first = weakref.ref(key)
    del key
    gc.collect()
    assert first() is None
    other = draw(2, 16, seed=1)
    compiled((query, other))
    ((asked, *blocks, number),) = calls
    assert asked is query
    assert number == 7
    assert all(one.base is other and one.block_shape == [1, 16] for one in blocks)


def test_half_precision():  # bfloat16, which the interpreter's NumPy does not have, is among the tests on the GPU
    assert max(compare((1, 6, 7, 2, 16), window=3, border="mask", biased=True, dtype=torch.float16)) < 1e-3


@pytest.mark.parametrize("border", BORDERS)
def test_logits_far_apart(border):
    """Where the largest logit lies far above those of the chunk that gives the reference, the tile is done again."""
    inputs = [draw(1, 9, 9, 1, 16, seed=seed) for seed in range(3)]
    with torch.no_grad():
        inputs[0].fill_(10.0)
        inputs[1].mul_(0.1)
        inputs[1][:, 4, :] = 40.0
    results = []
    for tensors, backend in (
        (inputs, "triton"),
        ([one.detach().double().requires_grad_() for one in inputs], "reference"),
    ):
        out = regular_attention(*tensors, window=7, border=border, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for measured, expected in zip(*results, strict=True):
        assert torch.isfinite(measured).all()
        assert relative(measured, expected) < 1e-4


def test_scales_from_0_down_take_another_way():
    inputs = [draw(1, 4, 4, 1, 16, seed=seed) for seed in range(3)]
    with pytest.raises(ValueError, match="scales above 0"):
        regular_attention(*inputs, window=3, scale=-1.0, backend="triton")


@settings(max_examples=6, deadline=None)
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 19),
    window=st.sampled_from([3, 5, 7]),
    border=st.sampled_from(BORDERS),
    biased=st.booleans(),
)
def test_any_grid(height, width, window, border, biased):
    assert (
        max(compare((1, height, width, 1, 16), window=window, border=border, biased=biased, dtype=torch.float32)) < 1e-5
    )


@pytest.mark.parametrize("form", [1, 2])
def test_packed_projections_give_packed_gradients(form):
    query, key, value = (draw(2, 5, 9, 2, 16, seed=seed) for seed in range(3))
    with torch.no_grad():
        parts = [torch.stack([query, key, value], 3)] if form == 1 else [torch.stack([query, value], 3), key.clone()]
    parts = [part.requires_grad_() for part in parts]
    packed = packed_regular_attention(*parts, window=3, backend="triton")
    apart = regular_attention(query, key, value, window=3, backend="tiled")
    torch.testing.assert_close(packed, apart)
    packed.square().sum().backward()
    apart.square().sum().backward()
    gradients = unpack([part.grad for part in parts])
    for measured, tensor in zip(gradients, (query, key, value), strict=True):
        torch.testing.assert_close(measured, tensor.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", [1, 2, 3])
def test_only_the_bias_learns(form):
    """However many tensors the projections come in."""
    (query, key, value), bias = (draw(1, 4, 5, 1, 16, seed=seed).detach() for seed in range(3)), draw(1, 3, 3, seed=3)
    out = regular_attention(query, key, value, window=3, bias=bias, backend="tiled")
    (expected,) = torch.autograd.grad(out.square().sum(), bias)
    if form < 3:
        parts = [torch.stack([query, key, value], 3)] if form == 1 else [torch.stack([query, value], 3), key]
        out = packed_regular_attention(*parts, window=3, bias=bias, backend="triton")
    else:
        out = regular_attention(query, key, value, window=3, bias=bias, backend="triton")
    (measured,) = torch.autograd.grad(out.square().sum(), bias)
    torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("order", "lowered"), [(2, False), (2, True), (3, False)])
def test_higher_derivatives_come_from_the_tiled_path(order, lowered):
    inputs = [draw(1, 4, 5, 1, 16, seed=seed) for seed in range(3)] + [draw(1, 3, 3, seed=3)]
    results = []
    for backend in ("triton", "tiled"):
        loss = regular_attention(*inputs[:3], window=3, bias=inputs[3], backend=backend).square().sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=lowered):
            for number in range(order):
                slopes = torch.autograd.grad(loss, inputs, create_graph=number + 1 < order)
                loss = sum(slope.sin().sum() for slope in slopes)
        results.append(slopes)
    for measured, expected in zip(*results, strict=True):
        assert not measured.requires_grad
        torch.testing.assert_close(measured, expected, atol=1e-3, rtol=1e-3)


def test_transforms_take_the_tiled_path():
    """Of which kernels know nothing: a tangent would be lost."""
    query, key, value = (draw(1, 4, 5, 1, 16, seed=seed).detach() for seed in range(3))
    results = []
    for backend in ("triton", "tiled"):

        def attend(query, backend=backend):
            return regular_attention(query, key, value, window=3, backend=backend)

        def dual(query, attend=attend):
            with torch.autograd.forward_ad.dual_level():
                out = torch.compile(attend, backend="eager")(torch.autograd.forward_ad.make_dual(query, key))
                return torch.autograd.forward_ad.unpack_dual(out).tangent

        def along(query, attend=attend):
            return torch.func.jvp(attend, (query,), (key,))[1]

        learning = query.clone().requires_grad_()
        out, slopes = attend(learning), draw(2, 1, 4, 5, 1, 16, seed=4).detach()
        results.append(
            [
                torch.vmap(attend)(torch.stack([query, key])),
                torch.func.grad(lambda query, attend=attend: attend(query).square().sum())(query),
                along(query),
                torch.compile(along, backend="eager", fullgraph=True)(query),
                dual(query),
                torch.autograd.grad(out, learning, slopes, is_grads_batched=True)[0],
            ]
        )
    for measured, expected in zip(*results, strict=True):
        torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-4)


def test_registered_as_an_operation():
    inputs = [draw(1, 3, 4, 1, 16, seed=seed) for seed in range(3)]
    torch.library.opcheck(
        torch.ops.spatially.regular_attention.default,
        (inputs, draw(1, 3, 3), 3, "mask", 0.25),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_compiles_into_one_graph_and_exports():
    inputs = [draw(2, 4, 5, 1, 16, seed=seed) for seed in range(3)] + [draw(1, 3, 3, seed=3)]

    def attend(query, key, value, bias):
        return regular_attention(query, key, value, window=3, bias=bias, backend="triton")

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for measured, expected in zip(*results, strict=True):
        torch.testing.assert_close(measured, expected)

    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return attend(*tensors)

    given = [tensor.detach() for tensor in inputs]
    program = torch.export.export(Layer(), tuple(given))
    torch.testing.assert_close(program.module()(*given), results[0][0].detach())


def test_counted_operations():
    inputs = [draw(2, 3, 4, 2, 16, seed=seed) for seed in range(3)]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        regular_attention(*inputs, window=3, backend="triton").sum().backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * (2 * 3 * 4 * 2) * 16 * 9


def test_no_images_and_what_it_does_not_take():
    empty = [draw(0, 4, 4, 1, 16) for _ in range(3)]
    assert regular_attention(*empty, window=3, backend="triton").shape == (0, 4, 4, 1, 16)
    with pytest.raises(
        ValueError, match="backend='triton' takes half and single precision, windows up to 13, heads up to 128"
    ):
        regular_attention(*(tensor.double() for tensor in empty), window=3, backend="triton")


def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter runs what the compiler may refuse."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), "90", "0", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4 * 2 + 3 * 2 + 3


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_the_gpu(border, dtype):
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
    for window, size in ((3, 16), (7, 32), (13, 128)):
        errors = compare((2, 15, 22, 2, size), window=window, border=border, biased=True, dtype=dtype)
        assert max(errors) < tolerance, (window, size, errors)
    kept = []
    for _ in range(3):  # the second time by what was compiled, at other addresses; with slim tiles at the right
        errors = compare((2, 15, 28, 2, 32), window=7, border=border, biased=False, dtype=dtype)
        assert max(errors) < tolerance, errors
        kept.append(torch.empty(1 << 16, device=DEVICE))
    for side in (2, 4, 7):
        errors = compare((2, side, side, 2, 32), window=7, border=border, biased=False, dtype=dtype)
        assert max(errors) < tolerance, (side, errors)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_same_bits_again():
    inputs = [draw(4, 28, 28, 6, 32, dtype=torch.bfloat16, seed=seed) for seed in range(3)] + [draw(6, 7, 7, seed=3)]
    runs = []
    for _ in range(3):
        out = regular_attention(*inputs[:3], window=7, bias=inputs[3])
        runs.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for other in runs[1:]:
        assert all(torch.equal(one, again) for one, again in zip(runs[0], other, strict=True))

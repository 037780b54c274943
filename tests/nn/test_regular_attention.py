"""Query-centred attention against dense attention with an explicit mask, in every border mode."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from spatially.errors import UserError
from spatially.nn import RegularSelfAttention
from spatially.nn.regular_attention import BORDERS, packed_regular_attention, regular_attention, tiled

BACKENDS = ("reference", "tiled")  # that PyTorch itself computes, in float64; kernels have their own file


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for _ in range(3)
    ]


def draw_bias(heads: int, window: int, *, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(heads, window, window, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def dense(query: Tensor, key: Tensor, value: Tensor, *, window: int, border: str, bias: Tensor | None) -> Tensor:
    """All pairs of positions, with a mask written by loops over queries and slots; nothing shared with the package."""
    batch, height, width, heads, size = query.shape
    half = window // 2
    out = torch.zeros_like(query)
    for row in range(height):
        for column in range(width):
            first = [row - half, column - half]
            if border == "shift":
                first = [min(max(a, 0), max(n - window, 0)) for a, n in zip(first, (height, width), strict=True)]
            logits, values = [], []
            for i in range(window):
                for j in range(window):
                    y, x = first[0] + i, first[1] + j
                    added = 0.0 if bias is None else bias[:, i, j]
                    if 0 <= y < height and 0 <= x < width:
                        logits.append((query[:, row, column] * key[:, y, x]).sum(-1) / math.sqrt(size) + added)
                        values.append(value[:, y, x])
                    elif border == "zero":
                        logits.append(torch.zeros(batch, heads, dtype=query.dtype) + added)
                        values.append(torch.zeros(batch, heads, size, dtype=query.dtype))
            weights = torch.stack(logits).softmax(0)
            out[:, row, column] = (weights[..., None] * torch.stack(values)).sum(0)
    return out


@pytest.mark.parametrize("grid", [(6, 9), (2, 11), (1, 1)])
@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_dense_attention(grid, window, border, with_bias):
    tensors = draw(2, *grid, 2, 4)
    bias = draw_bias(2, window) if with_bias else None
    expected = dense(*tensors, window=window, border=border, bias=bias)
    for backend in BACKENDS:
        measured = regular_attention(*tensors, window=window, border=border, bias=bias, backend=backend)
        torch.testing.assert_close(measured, expected, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    window=st.integers(0, 6).map(lambda half: 2 * half + 1),
    border=st.sampled_from(BORDERS),
    with_bias=st.booleans(),
    batch=st.integers(0, 3),
)
def test_tiled_equals_reference_with_gradients(height, width, window, border, with_bias, batch):
    tensors = draw(batch, height, width, 2, 3, grad=True)
    bias = draw_bias(2, window, grad=True) if with_bias else None
    inputs = [*tensors, *([bias] if with_bias else [])]
    results = []
    for backend in ("reference", "tiled"):
        out = regular_attention(*tensors, window=window, border=border, bias=bias, backend=backend)
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    with torch.no_grad():  # the fused path
        results[0].append(results[0][0])
        results[1].append(regular_attention(*tensors, window=window, border=border, bias=bias, backend="tiled"))
    for expected, measured in zip(*results, strict=True):
        torch.testing.assert_close(measured, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_first_and_second_derivatives(backend, border, with_bias):
    tensors = draw(1, 3, 5, 2, 2, grad=True)
    inputs = [*tensors, *([draw_bias(2, 3, grad=True)] if with_bias else [])]

    def attend(query, key, value, bias=None):
        return regular_attention(query, key, value, window=3, border=border, bias=bias, backend=backend)

    assert gradcheck(attend, inputs)
    assert gradgradcheck(attend, inputs)


@pytest.mark.parametrize("with_bias", [False, True])
def test_blocks_of_some_images_and_some_tiles(monkeypatch, with_bias):
    monkeypatch.setattr(tiled, "BLOCK", 2 * 2 * 9 * 25 * 2)
    tensors = draw(5, 9, 14, 2, 3, grad=True)
    inputs = [*tensors, *([draw_bias(2, 3, grad=True)] if with_bias else [])]
    results = []
    for backend in BACKENDS:
        bias = inputs[3] if with_bias else None
        out = regular_attention(*tensors, window=3, bias=bias, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, measured in zip(*results, strict=True):
        torch.testing.assert_close(measured, expected, atol=1e-10, rtol=0)


def test_derivatives_where_query_key_and_value_are_one_tensor():
    (points, *_), bias = draw(1, 4, 5, 2, 2, grad=True), draw_bias(2, 3)

    def attend(points):
        return regular_attention(points, points, points, window=3, bias=bias, backend="tiled")

    assert gradcheck(attend, [points], check_batched_grad=True)
    assert gradgradcheck(attend, [points], check_batched_grad=True)


def test_only_some_inputs_learn():
    tensors, bias = draw(1, 8, 8, 2, 4), draw_bias(2, 3)
    for learning in (*tensors, bias):
        learning.requires_grad_()
        slopes = []
        for backend in BACKENDS:
            out = regular_attention(*tensors, window=3, bias=bias, backend=backend)
            slopes.append(torch.autograd.grad(out.square().sum(), learning, create_graph=True)[0])
            slopes.append(torch.autograd.grad(slopes[-1].square().sum(), learning)[0])
        torch.testing.assert_close(slopes[2:], slopes[:2], atol=1e-10, rtol=0)
        learning.requires_grad_(False)


@pytest.mark.parametrize("border", ["mask", "shift"])
def test_covering_window_is_full_attention(border):
    query, key, value = draw(2, 5, 7, 3, 4)
    expected = F.scaled_dot_product_attention(*(t.flatten(1, 2).transpose(1, 2) for t in (query, key, value)))
    measured = regular_attention(query, key, value, window=13, border=border)
    torch.testing.assert_close(measured.flatten(1, 2).transpose(1, 2), expected, atol=1e-12, rtol=0)


def test_interior_is_translation_equivariant():
    tensors = draw(1, 20, 23, 2, 4)
    moved = [t.roll((2, 3), (1, 2)) for t in tensors]
    plain, shifted = (regular_attention(*t, window=5, bias=draw_bias(2, 5)) for t in (tensors, moved))
    torch.testing.assert_close(shifted[:, 4:18, 5:21], plain[:, 2:16, 2:18], atol=1e-12, rtol=0)


def test_scale_and_a_bias_that_closes_slots():
    query, key, value = draw(1, 6, 6, 2, 4)
    bias = torch.full((2, 3, 3), -math.inf, dtype=torch.float64)
    bias[:, 1, 1] = 0.0
    torch.testing.assert_close(regular_attention(query, key, value, window=3, bias=bias), value)
    uniform = regular_attention(query, key, torch.ones_like(value), window=3, scale=0.0, border="zero")
    assert uniform[0, 0, 0, 0, 0] == pytest.approx(4 / 9)  # in the corner five of nine slots are zero


def test_views_of_one_packed_projection():
    packed = torch.randn(2, 9, 10, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    apart = [part.detach().contiguous().requires_grad_() for part in packed.unbind(3)]
    together = regular_attention(*packed.unbind(3), window=5)
    separate = regular_attention(*apart, window=5)
    torch.testing.assert_close(together, separate)
    together.square().sum().backward()
    separate.square().sum().backward()
    torch.testing.assert_close(packed.grad, torch.stack([part.grad for part in apart], 3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lower_precision(backend, dtype, tolerance):
    bias = draw_bias(2, 7)
    exact = draw(2, 15, 12, 2, 16, grad=True)
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in rounded]
    results = []
    for tensors, kind in ((exact, torch.float64), (rounded, torch.float32)):
        out = regular_attention(*tensors, window=7, bias=bias.to(kind), backend=backend)
        with torch.no_grad():
            fused = regular_attention(*tensors, window=7, bias=bias.to(kind), backend=backend)
        results.append([out, fused, *torch.autograd.grad(out.square().sum(), tensors)])
    for expected, measured in zip(*results, strict=True):
        assert measured.dtype == dtype
        assert (measured.double() - expected).norm() < tolerance * expected.norm()


def test_autocast_lowers_what_comes_in():
    query, key, value = draw(1, 8, 8, 2, 4, dtype=torch.float32)
    bias = draw_bias(2, 3, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = regular_attention(query, key.bfloat16(), value, window=3, bias=bias)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert bias.grad.dtype == torch.float32
    torch.testing.assert_close(
        out.float(), regular_attention(query, key, value, window=3, bias=bias), atol=0.05, rtol=0.05
    )


class Layer(torch.nn.Module):
    """A layer with a bias, for exports."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.bias = torch.nn.Parameter(draw_bias(2, window, dtype=torch.float32))

    def forward(self, packed: Tensor) -> Tensor:
        return regular_attention(*packed.unbind(3), window=self.window, bias=self.bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_graph_breaks(backend):
    tensors = draw(1, 9, 9, 2, 4, dtype=torch.float32, grad=True)
    bias = draw_bias(2, 3, dtype=torch.float32, grad=True)

    def attend(*inputs):
        return regular_attention(*inputs[:3], window=3, bias=inputs[3], backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(*tensors, bias), attend(*tensors, bias))
    expected = torch.autograd.grad(attend(*tensors, bias).square().sum(), [*tensors, bias])
    for measured, right in zip(
        torch.autograd.grad(compiled(*tensors, bias).square().sum(), [*tensors, bias]), expected, strict=True
    ):
        torch.testing.assert_close(measured, right)


def test_compiled_function_takes_several_grids_and_batches():
    compiled = torch.compile(lambda *inputs: regular_attention(*inputs, window=3), fullgraph=True, backend="aot_eager")
    for shape in ((2, 9, 9), (2, 12, 10), (3, 12, 10), (1, 5, 7)):
        tensors = draw(*shape, 2, 4)
        torch.testing.assert_close(compiled(*tensors), regular_attention(*tensors, window=3))


def test_compiled_function_takes_several_scales():
    def attend(*inputs, scale):
        return regular_attention(*inputs, window=3, scale=scale)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 3):  # the second leaves the number free
        tensors = draw(1, 4, 4, 1, 4)
        torch.testing.assert_close(compiled(*tensors, scale=scale), attend(*tensors, scale=scale))


def test_exports_with_any_batch():
    layer = Layer(5)
    program = torch.export.export(
        layer, (torch.randn(2, 11, 8, 3, 2, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    packed = torch.randn(5, 11, 8, 3, 2, 4)
    torch.testing.assert_close(program.module()(packed), layer(packed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend):
    stacked = draw(4, 2, 6, 7, 2, 4)
    biases = torch.stack([draw_bias(2, 3) * i for i in range(4)])

    def attend(query, key, value, bias):
        return regular_attention(query, key, value, window=3, bias=bias, backend=backend)

    expected = torch.stack([attend(*(t[i] for t in stacked), biases[i]) for i in range(4)])
    torch.testing.assert_close(torch.vmap(attend)(*stacked, biases), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_and_hessian_vector_products(backend):
    query, key, value = draw(1, 4, 5, 1, 2)
    direction = draw(1, 4, 5, 1, 2, seed=2)[0]

    def loss(query):
        return regular_attention(query, key, value, window=3, backend=backend).square().sum()

    gradient = torch.func.grad(loss)
    _, slope = torch.func.jvp(loss, (query,), (direction,))
    torch.testing.assert_close(slope, (gradient(query) * direction).sum())
    _, product = torch.func.jvp(gradient, (query,), (direction,))
    step = 1e-5
    difference = (gradient(query + step * direction) - gradient(query - step * direction)) / (2 * step)
    torch.testing.assert_close(product, difference, atol=1e-8, rtol=1e-6)


def test_counted_operations_are_those_of_the_definition_on_meta_tensors():
    tensors = [torch.empty(2, 56, 56, 3, 32, device="meta") for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        regular_attention(*tensors, window=7)
    assert counter.get_total_flops() == 2 * (2 * 2 * 56 * 56 * 3 * 32 * 49)


@pytest.mark.parametrize("again", [False, True])
def test_backward_under_autocast_is_that_without(again):
    """Whoever asks for the gradient, it is of what forward computed."""
    inputs = [*draw(2, 9, 10, 2, 8, dtype=torch.float32, grad=True), draw_bias(2, 5, dtype=torch.float32, grad=True)]
    found = []
    for enabled in (False, True):
        out = regular_attention(*inputs[:3], window=5, bias=inputs[3], backend="tiled")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=again)
        if again:
            gradients = torch.autograd.grad(sum(one.square().sum() for one in gradients), inputs)
        found.append(gradients)
    for plain, lowered in zip(*found, strict=True):
        torch.testing.assert_close(plain, lowered, rtol=1e-4, atol=1e-4)


def test_a_model_trains_with_its_backward_pass_under_autocast():
    layer = RegularSelfAttention(16, 2, window_size=3)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 6, 6, 16)).float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_program_can_be_saved(tmp_path):
    layer, x = RegularSelfAttention(8, 2, window_size=3).eval(), torch.randn(1, 5, 6, 8)
    traced = torch.jit.trace(layer, x, check_trace=False)
    torch.jit.save(traced, tmp_path / "layer.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x), layer(x))


def test_inference_tensors_beside_a_bias_that_learns():
    with torch.inference_mode():
        inputs = draw(1, 5, 6, 2, 4)
    bias = draw_bias(2, 3, grad=True)
    expected, found = (regular_attention(*inputs, window=3, bias=bias, backend=backend) for backend in BACKENDS)
    (expected_slope,), (slope,) = (torch.autograd.grad(out.square().sum(), bias) for out in (expected, found))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slope, expected_slope)


def test_checkpointing_changes_nothing():
    tensors = draw(1, 9, 9, 2, 4, grad=True)

    def attend(*inputs):
        return regular_attention(*inputs, window=3).square().sum()

    expected = torch.autograd.grad(attend(*tensors), tensors)
    measured = torch.autograd.grad(checkpoint(attend, *tensors, use_reentrant=False), tensors)
    for one, other in zip(measured, expected, strict=True):
        assert torch.equal(one, other)


def like(**changes):
    query, key, value = draw(1, 4, 4, 2, 4, dtype=torch.float32)
    return {"query": query, "key": key, "value": value, "window": 3} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 4}, "window must be an odd positive whole number: got 4"),
        ({"window": -1}, "window must be .* got -1"),
        ({"window": 3.0}, "window must be .* got 3.0"),
        ({"border": "wrap"}, "border must be one of mask, zero, shift: got 'wrap'"),
        ({"backend": "cuda"}, "backend must be one of reference, tiled, triton: got 'cuda'"),
        (
            {"query": torch.zeros(4, 4, 2, 4)},
            r"query must be \(batch, height, width, heads, size\).* got \(4, 4, 2, 4\)",
        ),
        ({"query": torch.zeros(1, 0, 4, 2, 4)}, "none of the last four 0"),
        ({"query": torch.zeros(1, 4, 4, 2, 4, dtype=torch.long)}, "floating-point dtype: got torch.int64"),
        (
            {"key": torch.zeros(1, 4, 5, 2, 4)},
            r"key must have the query's shape \(1, 4, 4, 2, 4\): got \(1, 4, 5, 2, 4\)",
        ),
        (
            {"value": torch.zeros(1, 4, 4, 2, 4).double()},
            "value must have the query's dtype torch.float32: got torch.float64",
        ),
        ({"value": torch.zeros(1, 4, 4, 2, 4, device="meta")}, "value must be on the query's device cpu: got meta"),
        ({"key": None}, "key must be a tensor: got NoneType"),
        ({"bias": [[1.0]]}, "bias must be a tensor: got list"),
        ({"scale": math.nan}, "scale must be a finite number: got nan"),
        ({"scale": "1"}, "scale must be a finite number: got '1'"),
        ({"scale": torch.ones(())}, "scale must be a number: got a tensor; multiply the query by it, with scale=1"),
        ({"bias": torch.zeros(3, 3)}, r"bias must be .* = \(2, 3, 3\): got \(3, 3\)"),
        ({"bias": torch.zeros(2, 3, 3).double()}, "bias must have dtype torch.float32: got torch.float64"),
        ({"bias": torch.zeros(2, 3, 3, device="meta")}, "bias must be on the query's device cpu: got meta"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = like(**changes)
    with pytest.raises(ValueError, match=message):
        regular_attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


def test_a_model_compiles_into_one_graph_under_autocast():
    layer = RegularSelfAttention(16, 2, window_size=3, convolved="key")
    images = torch.randn(1, 5, 6, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(images), layer(images))


def test_packed_projections_are_the_same_function():
    packed = torch.randn(2, 5, 6, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    query, key, value = packed.unbind(3)
    expected = regular_attention(query, key, value, window=3)
    torch.testing.assert_close(packed_regular_attention(packed, window=3), expected)
    torch.testing.assert_close(packed_regular_attention(packed[:, :, :, ::2], key, window=3), expected)
    with pytest.raises(UserError, match=r"packed must be \(batch, height, width, 3, heads, size\)"):
        packed_regular_attention(query, window=3)

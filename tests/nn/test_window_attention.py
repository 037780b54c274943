"""Window attention against timm's block, and against a dense attention over the whole map in float64."""

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock, get_relative_position_index

from spatially.errors import UserError
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.window_attention import WindowAttention, neighbour_mask, offset_index

DOUBLE = torch.float64


def layer(dim: int = 8, heads: int = 2, **options: object) -> WindowAttention:
    torch.manual_seed(0)
    made = WindowAttention(dim, heads, dtype=DOUBLE, **options)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return made


def timm_block(ours: WindowAttention, grid: tuple[int, int], dim: int = 8) -> SwinTransformerBlock:
    """timm's block with our weights, its window and shift as told."""
    block = SwinTransformerBlock(
        dim,
        grid,
        ours.num_heads,
        window_size=ours.window_size,
        shift_size=ours.shift_size,
        always_partition=True,
        dynamic_mask=True,
        dtype=DOUBLE,
    )
    block.attn.load_state_dict(ours.state_dict())
    return block


@pytest.mark.parametrize("grid", [(8, 8), (9, 14), (3, 5), (1, 12)])
@pytest.mark.parametrize(("window", "shift"), [((4, 4), (0, 0)), ((4, 4), (2, 2)), ((4, 3), (2, 1)), ((4, 4), (0, 2))])
def test_equals_timm_on_any_grid(grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> None:
    ours = layer(window_size=window, shift_size=shift)
    block = timm_block(ours, grid)
    x = torch.randn(2, *grid, 8, dtype=DOUBLE, requires_grad=True)
    mine, theirs = ours(x), block._attn(x)
    torch.testing.assert_close(mine, theirs)
    gradients = [
        torch.autograd.grad((out**2).sum(), [x, *m.parameters()]) for out, m in ((mine, ours), (theirs, block.attn))
    ]
    for name, (one, other) in zip(["x", *dict(ours.named_parameters())], zip(*gradients, strict=True), strict=False):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("window", [(7, 7), (3, 5), (1, 1)])
def test_index_is_timm_s(window: tuple[int, int]) -> None:
    assert torch.equal(offset_index(window), get_relative_position_index(*window).flatten())


def test_equals_dense_attention_between_true_neighbours() -> None:
    """Shifted windows on a grid of whole windows: plain windows of the map whose corner lies at −shift."""
    height = width = 8
    ours = layer(window_size=4, shift_size=2, gaussian_bias=GaussianBias(2, per_head=True, dtype=DOUBLE))
    x = torch.randn(1, height, width, 8, dtype=DOUBLE)
    rows, columns = (place.flatten() for place in torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"))
    together = ((rows + 2) // 4)[:, None] == ((rows + 2) // 4)[None]
    together &= ((columns + 2) // 4)[:, None] == ((columns + 2) // 4)[None]
    down, right = rows[:, None] - rows, columns[:, None] - columns
    table = ours.relative_position_bias_table.view(7, 7, 2)[(down + 3).clamp(0, 6), (right + 3).clamp(0, 6)].permute(
        2, 0, 1
    )
    amplitude, sigma = (value[:, None, None] for value in (ours.gaussian_bias.amplitude, ours.gaussian_bias.sigma))
    gaussian = amplitude**2 * torch.exp(-(down**2 + right**2) / (2 * sigma**2))
    query, key, value = ours.qkv(x.flatten(0, 2)).view(64, 3, 2, 4).permute(1, 2, 0, 3)
    logits = query @ key.mT / 2 + table + gaussian
    attended = logits.masked_fill(~together, float("-inf")).softmax(-1) @ value
    expected = ours.proj(attended.transpose(0, 1).flatten(1)).view(1, 8, 8, 8)
    torch.testing.assert_close(ours(x), expected)


def test_what_a_stage_shares_changes_nothing() -> None:
    ours = layer(window_size=4, shift_size=2)
    x = torch.randn(2, 8, 10, 8, dtype=DOUBLE)
    mask = neighbour_mask((8, 10), (4, 4), (2, 2), dtype=DOUBLE)
    assert torch.equal(ours(x), ours(x, index=offset_index((4, 4)), mask=mask))


def test_the_formula_and_the_fused_operation_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices than the CPU take the fused operation: here it runs on the CPU's tensors."""
    for options in ({"shift_size": 2}, {}, {"position_table": False}, {"position_table": False, "shift_size": 2}):
        ours = layer(window_size=4, **options)
        x = torch.randn(2, 8, 8, 8, dtype=DOUBLE)
        expected = ours(x)
        with monkeypatch.context() as patch:
            patch.setattr("spatially.nn.window_attention.FORMULA_DEVICES", ())
            torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("grid", [(8, 8), (6, 9)])
def test_a_convolution_of_its_centre_alone_is_the_linear_projection(grid: tuple[int, int]) -> None:
    """Also where the map is filled up to whole windows: what is filled in projects to the biases."""
    plain = layer(window_size=4, shift_size=2, position_table=False)
    convolved = layer(window_size=4, shift_size=2, position_table=False, convolved="key")
    parts = [weights.chunk(3) for weights in (plain.qkv.weight, plain.qkv.bias)]
    with torch.no_grad():
        for name, (query, key, value) in zip(("weight", "bias"), parts, strict=True):
            getattr(convolved.qkv.linear, name).copy_(torch.cat([query, value]))
            if name == "bias":
                convolved.qkv.key.bias.copy_(key)
            else:
                convolved.qkv.key.weight.zero_()[:, :, 1, 1] = key
        convolved.proj.load_state_dict(plain.proj.state_dict())
    x = torch.randn(2, *grid, 8, dtype=DOUBLE)
    torch.testing.assert_close(convolved(x), plain(x))


def test_the_convolution_sees_across_windows() -> None:
    """It runs over the whole map before the windows are cut, and does not wrap around the roll."""
    ours = layer(window_size=4, shift_size=0, position_table=False, convolved="key")
    x = torch.randn(1, 8, 8, 8, dtype=DOUBLE, requires_grad=True)
    reach = torch.autograd.grad(ours(x)[0, 1, 1].sum(), x)[0].abs().sum(-1)[0] > 0
    assert reach[:5, :5].all()
    assert not reach[5:].any()
    assert not reach[:, 5:].any()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": 3}, "num_heads"),
        ({"heads": 0}, "num_heads"),
        ({"window_size": 3.5}, "window_size"),
        ({"window_size": 4, "shift_size": 4}, "shift_size"),
        ({"window_size": (4, 2), "shift_size": 2}, "shift_size"),
        ({"shift_size": -1}, "shift_size"),
    ],
)
def test_mistakes_are_named(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        layer(**options)


@pytest.mark.parametrize("shift", [0, 1])
def test_no_maps(shift: int) -> None:
    assert layer(window_size=3, shift_size=shift)(torch.zeros(0, 5, 6, 8, dtype=DOUBLE)).shape == (0, 5, 6, 8)

"""Other ways to attend over the square around each query, for `regular_attention.py`.

Each takes (query, key, value, bias), the maps as (B, H, W, heads, D), and returns (B, H, W, heads, D) with squares masked at
the border, unless said otherwise. A peer that is not installed or does not run is left out, with
the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spatially.nn import packed_regular_attention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def ours(window: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The function under test, from one packed projection."""
    return lambda packed, bias: packed_regular_attention(packed, window=window, bias=bias)


@lru_cache
def _inside(height: int, width: int, window: int, device: torch.device) -> Tensor:
    """Which slots lie in the image: (1, 1, window², pixels)."""
    ones = torch.ones(1, 1, height, width, device=device)
    return F.unfold(ones, window, padding=window // 2).reshape(1, 1, window * window, height * width) > 0


def unfold(window: int) -> Attention:
    """The usual way: `F.unfold` copies the square of every query."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, height, width, heads, size = query.shape

        def squares(tensor: Tensor) -> Tensor:  # (B·heads, pixels, D, window²)
            planes = tensor.permute(0, 3, 4, 1, 2).reshape(batch * heads, size, height, width)
            copies = F.unfold(planes, window, padding=window // 2)
            return copies.reshape(batch * heads, size, window * window, height * width).permute(0, 3, 1, 2)

        queries = query.permute(0, 3, 1, 2, 4).reshape(batch * heads, height * width, 1, size) * size**-0.5
        logits = queries @ squares(key)
        logits = logits.reshape(batch, heads, height * width, window * window)
        if bias is not None:
            logits = logits + bias.reshape(1, heads, 1, window * window).to(logits.dtype)
        inside = _inside(height, width, window, query.device)
        logits = logits.masked_fill(~inside.transpose(-2, -1), float("-inf"))
        weights = logits.softmax(-1).reshape(batch * heads, height * width, 1, window * window)
        out = weights @ squares(value).transpose(-2, -1)
        return out.reshape(batch, heads, height, width, size).permute(0, 2, 3, 1, 4)

    return attend


def shifts(window: int) -> Attention:
    """A loop over the window's offsets, with slices of the padded maps: no copies, window² small operations."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        _, height, width, heads, size = query.shape
        half = window // 2
        keys, values = (F.pad(tensor, (0, 0, 0, 0, half, half, half, half)) for tensor in (key, value))
        queries = query * size**-0.5
        inside = _inside(height, width, window, query.device).reshape(window * window, 1, height, width, 1)
        places = [(y, x) for y in range(window) for x in range(window)]
        logits = torch.stack([(queries * keys[:, y : y + height, x : x + width]).sum(-1) for y, x in places])
        if bias is not None:
            logits = logits + bias.reshape(heads, -1).T.reshape(-1, 1, 1, 1, heads).to(logits.dtype)
        weights = logits.masked_fill(~inside, float("-inf")).softmax(0)
        out = torch.zeros_like(query)
        for weight, (y, x) in zip(weights, places, strict=True):
            out = out + weight[..., None] * values[:, y : y + height, x : x + width]
        return out

    return attend


@lru_cache
def _slots(height: int, width: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For all pairs of pixels the number of the slot, and whether there is one."""
    rows, columns = (torch.arange(n, device=device) for n in (height, width))
    down = (rows[None] - rows[:, None] + window // 2)[:, None, :, None]
    across = (columns[None] - columns[:, None] + window // 2)[None, :, None, :]
    taken = (down >= 0) & (down < window) & (across >= 0) & (across < window)
    number = down.clamp(0, window - 1) * window + across.clamp(0, window - 1)
    pixels = height * width
    return number.reshape(pixels, pixels), taken.reshape(pixels, pixels)


def dense(window: int) -> Attention:
    """All pairs of pixels through `scaled_dot_product_attention`, those outside the square masked."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, height, width, heads, size = query.shape
        number, taken = _slots(height, width, window, query.device)
        if bias is None:
            mask = torch.zeros(1, *taken.shape, device=query.device, dtype=query.dtype)
        else:
            mask = bias.reshape(heads, -1).to(query.dtype)[:, number]
        mask = mask.masked_fill(~taken, float("-inf"))
        tokens = [tensor.reshape(batch, height * width, heads, size).transpose(1, 2) for tensor in (query, key, value)]
        out = F.scaled_dot_product_attention(*tokens, attn_mask=mask)
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def windows(window: int) -> Attention:
    """Swin's own: the grid cut into windows, so most queries are off-centre. Another function, at the same window."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, height, width, heads, size = query.shape
        if height % window or width % window:
            raise ValueError(f"windows of {window} do not tile {height}×{width}")
        down, across = height // window, width // window

        def cut(tensor: Tensor) -> Tensor:
            tensor = tensor.unflatten(2, (across, window)).unflatten(1, (down, window))
            return tensor.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch * down * across, heads, window * window, size)

        mask = None
        if bias is not None:  # Swin's table has (2·window − 1)² entries; the part that both have costs the same
            number, taken = _slots(window, window, window, query.device)
            mask = bias.reshape(heads, -1).to(query.dtype)[:, number].masked_fill(~taken, 0.0)
        out = F.scaled_dot_product_attention(cut(query), cut(key), cut(value), attn_mask=mask)
        out = out.reshape(batch, down, across, heads, window, window, size).permute(0, 1, 4, 2, 5, 3, 6)
        return out.reshape(query.shape)

    return attend


def flex(window: int) -> Attention:
    """FlexAttention with a block mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # one for each shape that is measured
    compiled = torch.compile(flex_attention, dynamic=False)
    half = window // 2

    @lru_cache
    def block_mask(height: int, width: int, device: torch.device):
        def near(_batch: Tensor, _head: Tensor, one: Tensor, other: Tensor) -> Tensor:
            close_down = (one // width - other // width).abs() <= half
            return close_down & ((one % width - other % width).abs() <= half)

        pixels = height * width
        return create_block_mask(near, None, None, pixels, pixels, device=device)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, height, width, heads, size = query.shape
        tokens = [tensor.reshape(batch, height * width, heads, size).transpose(1, 2) for tensor in (query, key, value)]

        def with_bias(score: Tensor, _batch: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
            down = (other // width - one // width + half).clamp(0, window - 1)
            across = (other % width - one % width + half).clamp(0, window - 1)
            return score + bias[head, down, across]

        out = compiled(
            *tokens,
            block_mask=block_mask(height, width, query.device),
            score_mod=None if bias is None else with_bias,
        )
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def natten(window: int) -> Attention:
    """NATTEN: squares that slide inward at the border, no bias. Another function at the border."""
    from natten import na2d  # type: ignore[import-not-found]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            raise ValueError("NATTEN takes no bias")
        return na2d(query.contiguous(), key.contiguous(), value.contiguous(), kernel_size=window)

    return attend


def compiled_windows(window: int) -> Attention:
    """Swin's windows, compiled."""
    return torch.compile(windows(window), dynamic=False)


PEERS: dict[str, Callable[[int], Callable[..., Tensor]]] = {
    "ours": ours,
    "unfold": unfold,
    "shift loop": shifts,
    "dense mask": dense,
    "Swin windows": windows,
    "Swin windows, compiled": compiled_windows,
    "FlexAttention": flex,
    "NATTEN": natten,
}
OTHER_FUNCTIONS = {"Swin windows", "Swin windows, compiled", "NATTEN"}  # not compared with the exact result

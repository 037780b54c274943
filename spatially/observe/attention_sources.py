r"""Attention weights of chosen images, from what the model computes anyway: softmax(scale · q kᵀ + mask) over keys.

The model runs its own kernel; weights are computed beside it, in single precision at least, only when they are asked for.
Each source gives (images, windows, heads, queries, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.reference import inside, squares
from spatially.observe.attention_arrangement import Arrangement


class Source(Protocol):
    """The weights of one layer in one forward pass."""

    def take(self, images: range, batch: int) -> Tensor: ...


def exact(tensor: Tensor) -> Tensor:
    """Half precision as single."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def exactly(tensor: Tensor) -> AbstractContextManager[Any]:
    """While this lasts, autocast does not make half precision of it. Where there is none, nothing is asked of it: contexts
    are dear beside the launch of a kernel."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@dataclass(frozen=True)
class Products:
    """Of `scaled_dot_product_attention`: queries (…, n, d), keys (…, m, d)."""

    arrangement: Arrangement
    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float
    causal: bool

    def take(self, images: range, batch: int) -> Tensor:
        lead = self.query.shape[:-2]
        key = self.key if self.key.shape[:-2] == lead else self.key.expand(*lead, -1, -1)
        query, key = (exact(self.arrangement.pick(one, images, batch)) for one in (self.query, key))
        with exactly(query):
            logits = (query * self.scale) @ key.mT
        if self.causal:
            logits = logits.masked_fill(
                torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril().logical_not(), -torch.inf
            )
        if self.mask is not None:
            mask = self.arrangement.pick(self.mask.expand(*lead, *self.mask.shape[-2:]), images, batch)
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        return logits.softmax(-1)


@dataclass(frozen=True)
class Written:
    """Of a softmax that the model writes out: its result, with queries and keys last."""

    arrangement: Arrangement
    weights: Tensor

    def take(self, images: range, batch: int) -> Tensor:
        return exact(self.arrangement.pick(self.weights, images, batch))


@dataclass(frozen=True)
class MultiHead:
    """Of `multi_head_attention_forward`, by asking it again for its weights: query, key and value are (length, lead, width)."""

    arrangement: Arrangement
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def take(self, images: range, batch: int) -> Tensor:
        device = self.arguments["query"].device
        lead = self.arrangement.index(torch.tensor(images, device=device), batch)[0][..., 0].flatten()
        heads, given = self.arguments["num_heads"], dict(self.arguments)
        for name in ("query", "key", "value"):
            given[name] = given[name].index_select(1, lead)
        if given.get("key_padding_mask") is not None:
            given["key_padding_mask"] = given["key_padding_mask"].index_select(0, lead)
        mask = given.get("attn_mask")
        if mask is not None and mask.ndim == 3:
            given["attn_mask"] = mask.unflatten(0, (-1, heads)).index_select(0, lead).flatten(0, 1)
        given |= {"training": False, "need_weights": True, "average_attn_weights": False}
        _, weights = self.function(**given)
        return exact(weights).unflatten(0, (len(images), -1))


@dataclass(frozen=True)
class Squares:
    """Of `regular_attention`, by its definition: every query is a window of its own, its keys are the slots of its square."""

    query: Tensor  # (B, H, W, heads, D)
    key: Tensor
    rows: Field
    columns: Field
    bias: Tensor | None
    scale: float

    def take(self, images: range, batch: int) -> Tensor:
        some = slice(images.start, images.stop, images.step)
        query, key = (exact(one[some]) for one in (self.query, self.key))
        with exactly(query):
            keys = squares(key, self.rows, self.columns)  # (b, H, W, heads, window², D)
            logits = ((query * self.scale).unsqueeze(-2) @ keys.mT).squeeze(-2)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype).flatten(1)
        logits = logits.masked_fill(~inside(self.rows, self.columns, query.device).unsqueeze(2), -torch.inf)
        return logits.softmax(-1).flatten(1, 2).unsqueeze(3)

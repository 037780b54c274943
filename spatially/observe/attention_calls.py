"""The functions in which attention happens, recognised while a model runs, and what they were called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from spatially.nn.regular_attention import regular_attention
from spatially.observe.origin_rules import name_of

FUSED, SOFTMAX, MULTI_HEAD, REGULAR = "fused", "softmax", "multi-head", "regular"
_KINDS = {
    "scaled_dot_product_attention": FUSED,
    "softmax": SOFTMAX,
    "special_softmax": SOFTMAX,
    "multi_head_attention_forward": MULTI_HEAD,
    "regular_attention": REGULAR,
    "regular_attention.default": REGULAR,
}
_FUSED_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


@lru_cache(1024)  # every function that the model calls is asked
def kind_of(function: Any) -> str | None:
    """Which kind of attention, or softmax, a function is; None for all others."""
    return _KINDS.get(name_of(function))


def fused_arguments(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of `scaled_dot_product_attention`; grouped keys are given to each of their heads."""
    given = dict(zip(_FUSED_NAMES, arguments, strict=False)) | dict(options)
    if given.get("scale") is None:
        given["scale"] = given["query"].shape[-1] ** -0.5
    given["key"] = grouped(given["key"], given)
    return given


def grouped(key: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Something of the keys' shape (…, heads, ·, ·), with a head for each of the queries'."""
    if not given.get("enable_gqa"):
        return key
    return key.repeat_interleave(given["query"].shape[-3] // key.shape[-3], -3)


def softmax_axis(arguments: tuple[Any, ...], options: Mapping[str, Any], rank: int) -> int | None:
    axis = options.get("dim", arguments[1] if len(arguments) > 1 else None)
    return axis % rank if isinstance(axis, int) and rank else None


def multi_head_arguments(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_MULTI_HEAD.bind(*arguments, **options).arguments)


def regular_arguments(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the function or of the operation `spatially::regular_attention`, whose projections may be packed."""
    if isinstance(arguments[0], (list, tuple)):
        from spatially.nn.regular_attention.operations import unpack  # Triton is imported where it is needed

        names = ("bias", "window", "border", "scale")
        query, key, _ = unpack(arguments[0])
        return {"query": query, "key": key} | dict(zip(names, arguments[1:], strict=False)) | dict(options)
    given = inspect.signature(regular_attention).bind(*arguments, **options)
    given.apply_defaults()
    found = dict(given.arguments)
    if found["scale"] is None:
        found["scale"] = found["query"].shape[-1] ** -0.5
    return found

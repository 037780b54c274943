"""Colours changed as Pillow changes them, another change for every image of a batch, in whole grey levels.

What treats each level of a channel alike is a table of 256 entries an image and channel: the tables of all images are made
together (from a histogram where needed) and looked up once. Colour and sharpness need neighbours or the other channels; they
blend the image with its grey or its smoothed form. A blend is floor(u + f·(x − u)), held within 0 … 255, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from spatially.train.augment.operations import NUMBER, OPERATIONS


def _four(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def grey(pixels: Tensor) -> Tensor:
    """Luma as Pillow converts to it: int32 levels ``(B, 1, H, W)``."""
    red, green, blue = pixels.to(torch.int32).split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16


def mean_grey(luma: Tensor) -> Tensor:
    """The mean of the luma, rounded to a whole level: float32 ``(B,)``."""
    count = luma[0].numel()
    total = luma.sum((1, 2, 3))
    return ((2 * total + count) // (2 * count)).float()


def blend(under: Tensor, over: Tensor, factor: Tensor) -> Tensor:
    """From ``under`` towards ``over`` and, beyond 1, past it."""
    return torch.floor((under + factor * (over - under)).clamp(0, 255))


def smoothed(pixels: Tensor) -> Tensor:
    """Pillow's SMOOTH: a 3×3 mean whose middle counts five times; the outermost pixels stay."""
    inner = pixels[:, :, 1:-1, 1:-1]
    total = functional.avg_pool2d(pixels, 3, stride=1, divisor_override=1) + 4 * inner
    result = pixels.clone()
    result[:, :, 1:-1, 1:-1] = torch.floor(total / 13 + 0.5)
    return result


def histogram(whole: Tensor) -> Tensor:
    """How often each level occurs, int64 ``(B, 3, 256)``, in levels int64 ``(B, 3, H, W)``."""
    batch, channels = whole.shape[:2]
    first = torch.arange(0, batch * channels * 256, 256, device=whole.device).view(batch, channels, 1)
    places = (whole.flatten(2) + first).flatten()
    counts = torch.zeros(batch * channels * 256, dtype=torch.int64, device=whole.device)
    return counts.scatter_add_(0, places, torch.ones_like(places)).view(batch, channels, 256)


def stretched(low: Tensor, high: Tensor, level: Tensor) -> Tensor:
    """Tables of AutoContrast: the darkest level becomes 0, the brightest 255. Pillow's order of operations in float64."""
    scale = 255.0 / (high - low).clamp(min=1).double()
    table = (level.double() * scale + -low * scale).clamp(0, 255).trunc()
    return torch.where(high > low, table, level)


def equalised(whole: Tensor, high: Tensor, level: Tensor) -> Tensor:
    """Tables of Equalize: levels spread so that each range of them is equally often met."""
    counts = histogram(whole)
    step = (whole[0, 0].numel() - counts.gather(2, high)) // 255
    before = counts.cumsum(2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, level)


def recolour(pixels: Tensor, kind: Tensor, argument: Tensor) -> Tensor:
    """Apply to each image the operation of its ``kind``; images of other kinds stay. Levels, float32 ``(B, 3, H, W)``."""
    whole, luma = pixels.long(), grey(pixels)
    low, high = (end.flatten(2) for end in torch.aminmax(whole.flatten(2), dim=2, keepdim=True))
    level = torch.arange(256, device=pixels.device)
    plain, value = level.float(), argument[:, None, None]
    is_kind = kind[:, None] == torch.arange(len(OPERATIONS), device=kind.device)
    contrast = is_kind[:, NUMBER["Contrast"]]
    block = torch.exp2(8 - value).round()  # levels that become one when so many bits are kept
    tables = {
        "AutoContrast": stretched(low, high, level),
        "Equalize": equalised(whole, high, level),
        "Invert": 255 - plain,
        "Posterize": torch.floor(plain / block) * block,
        "Solarize": torch.where(plain < value, plain, 255 - plain),
        "SolarizeAdd": torch.where(plain < 128, (plain + value).clamp(max=255), plain),
        "Contrast": blend((mean_grey(luma) * contrast)[:, None, None], plain, value),
    }
    tables["Brightness"] = tables["Contrast"]  # towards black: the mean counts for contrast alone
    table = plain.expand(len(pixels), 3, 256)
    for name, one in tables.items():
        table = torch.where(is_kind[:, NUMBER[name], None, None], one.float(), table)
    changed = table.gather(2, whole.flatten(2)).view(pixels.shape)
    colour, sharpness = (_four(is_kind[:, NUMBER[name]]) for name in ("Color", "Sharpness"))
    under = torch.where(colour, luma.float(), smoothed(pixels))
    return torch.where(colour | sharpness, blend(under, pixels, _four(argument)), changed)


JITTER_DRAWS = 6


def jitter_plan(uniform: Tensor, strength: float) -> Tensor:
    """What jitter does to each image, ``(B, 6)``: three factors within 1 ± ``strength``, and what each is for, in turn."""
    low = max(0.0, 1 - strength)
    order = uniform[:, 3:].argsort(1)
    return torch.cat([(low + (1 + strength - low) * uniform[:, :3]).gather(1, order), order], dim=1)


def jitter(pixels: Tensor, plan: Tensor) -> Tensor:
    """Brightness (0), contrast (1) and saturation (2) in the planned order, as torchvision's ColorJitter does it."""
    for factor, which in zip(plan[:, :3].float().unbind(1), plan[:, 3:].unbind(1), strict=True):
        luma = grey(pixels)
        flat = _four(mean_grey(luma) * (which == 1))
        under = torch.where(_four(which == 2), luma.float(), flat)
        pixels = blend(under, pixels, _four(factor))
    return pixels

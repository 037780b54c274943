"""The perturbed images themselves, as in figures 3 and 6 of Xu."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from spatially.drawing.panels import grid, title
from spatially.drawing.style import INK, MUTED, figure_style
from spatially.drawing.values import DONE, KINDS, square
from spatially.errors import UserError


def gallery(
    examples: xr.Dataset,
    *,
    kinds: Sequence[str] = KINDS,
    blocks: Sequence[int] = (8, 16, 24, 32),
    ratios: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    perturb: Mapping[str, Callable[..., Tensor]] | None = None,
    example: int = 0,
) -> Figure:
    """Figures 3 and 6: one image, a row a kind and block size, a column a ratio.

    They are the very images that the models saw: the draw depends on the seed and the image's number alone.
    """
    if not 0 <= example < examples.sizes["example"]:
        raise UserError(f"example must be 0 … {examples.sizes['example'] - 1}, not {example}")
    perturb = perturb or _perturbations()
    one = examples.isel(example=slice(example, example + 1))
    images = torch.from_numpy(np.ascontiguousarray(one["pixels"].values)).float() / 255
    index = torch.from_numpy(np.asarray(one["index"].values, dtype=np.int64))
    seed = int(examples.attrs.get("seed", 0))
    rows = [(kind, block) for kind in kinds for block in blocks]
    side = 0.92
    with figure_style():
        width = side * len(ratios) + 0.85
        figure, axes = grid(len(rows), len(ratios), width=width, height=side * len(rows) + 0.65, share=False)
        title(figure, "What the models were shown")
        for row, (kind, block) in zip(axes, rows, strict=True):
            row[0].set_ylabel(f"{DONE[kind]}\n{square(block)} px", color=INK, fontsize=7.5, linespacing=1.3)
            for panel, ratio in zip(row, ratios, strict=True):
                changed = perturb[kind](images, block=block, ratio=ratio, index=index, seed=seed)
                _show(panel, changed[0])
        for panel, ratio in zip(axes[0], ratios, strict=True):
            panel.set_title(f"α = {ratio:g}", loc="center", color=MUTED, fontsize=7.5)
    return figure


def _perturbations() -> Mapping[str, Callable[..., Tensor]]:
    from spatially.perturb import mask_blocks, shuffle_blocks

    return {"shuffle": shuffle_blocks, "mask": mask_blocks}


def _show(axes: Axes, image: Tensor) -> None:
    """Noise may leave 0..1: cut for the eye only."""
    axes.imshow(image.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)

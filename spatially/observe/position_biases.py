"""Biases of attention in whatever form a layer holds them: tables, networks, distances, Gaussians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor, nn

from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.local_window_attention import LocalWindowAttention
from spatially.nn.relative_position import RelPosBias, RelPosMlp
from spatially.observe.position import Position, as_array, as_pair, labelled
from spatially.observe.position_grids import Grids


def biases(model: nn.Module, grids: Grids) -> Iterator[Position]:
    layer, before = -1, ""
    for name, module in model.named_modules():
        for recognises, read in FORMS:
            if recognises(module):
                # A Gaussian beside another bias belongs to the same layer.
                owner = name.rpartition(".")[0]
                same = isinstance(module, GaussianBias) and before and f"{before}.".startswith(f"{owner}.")
                found = read(name, module, layer if same else layer + 1, grids)
                if found is not None:
                    yield found
                    layer, before = layer if same else layer + 1, name
                break


def _offsets(name: str, table: Tensor, layer: int, **more: xr.DataArray) -> Position:
    """A bias that is a table (heads, 2·height − 1, 2·width − 1) of offsets, query minus key."""
    height, width = ((side + 1) // 2 for side in table.shape[-2:])
    offsets = xr.DataArray(
        as_array(table),
        dims=("head", "offset_y", "offset_x"),
        coords={"offset_y": np.arange(1 - height, height), "offset_x": np.arange(1 - width, width)},
    )
    grid = (height, width)
    return Position(name, "relative", grid, {"offsets": offsets, **more}, layer=layer, key_grid=grid)


def _table(name: str, module: Any, layer: int, grids: Grids) -> Position | None:
    """`relative_position_bias_table`: (offsets, heads), three rows more where a class token takes part; or a map a head."""
    table: Tensor = module.relative_position_bias_table
    if table.ndim == 3:  # TensorFlow's MaxViT: key minus query
        return _offsets(name, table.flip(1, 2), layer)
    window = as_pair(
        getattr(module, "grid", None) or getattr(module, "window_size", None) or getattr(module, "size", None)
    )
    if window is None:
        window = (side := (isqrt(len(table)) + 1) // 2, side)
    rows, columns = 2 * window[0] - 1, 2 * window[1] - 1
    count = rows * columns
    if len(table) < count:
        return None
    more = {}
    if len(table) == count + 3:
        more["prefix"] = xr.DataArray(
            as_array(table[count:]),
            dims=("pair", "head"),
            coords={"pair": ["class to patch", "patch to class", "class to class"]},
        )
    offsets = table[:count].mT.reshape(-1, rows, columns)
    if isinstance(module, RelPosBias):  # ours answers for any grid
        offsets = module.table(grids.of(name) or window)
    return _offsets(name, offsets, layer, **more)


def _shared_by_heads(name: str, module: Any, layer: int, grids: Grids) -> Position:
    """AlterNet's: one table for all heads, key minus query."""
    return _offsets(name, module.position_table.flip(0, 1)[None], layer)


def _timm_network(name: str, module: Any, layer: int, grids: Grids) -> Position:
    """timm's `RelPosMlp`: a network of the offsets' logarithms, with or without a sigmoid."""
    values = module.bias_act(_evaluated(module.mlp, module.rel_coords_log))
    return _offsets(name, (values if module.bias_gain is None else module.bias_gain * values).permute(2, 0, 1), layer)


def _continuous(name: str, module: Any, layer: int, grids: Grids) -> Position:
    """Swin V2's continuous bias, 16·sigmoid of a network of the offsets' logarithms."""
    network = getattr(module, "cpb_mlp", None) or module.continuous_position_bias_mlp
    coordinates = module.relative_coords_table
    values = _evaluated(network, coordinates.reshape(coordinates.shape[-3:]))
    return _offsets(name, 16 * values.sigmoid().permute(2, 0, 1), layer)


def _paired_network(name: str, module: Any, layer: int, grids: Grids) -> Position:
    """timm's first Swin V2 (`cr`): a network that is asked for every pair of a window."""
    values = _evaluated(module.meta_mlp, module.relative_coordinates_log)  # (area², heads), a query's keys together
    window = as_pair(module.window_size) or (isqrt(isqrt(len(values))),) * 2
    pairs = xr.DataArray(
        as_array(values).T.reshape(-1, *window, *window),
        dims=("head", "query_y", "query_x", "key_y", "key_x"),
        name="bias",
    )
    return Position(name, "relative", window, {}, layer=layer, key_grid=window, _pairs=pairs)


def _own_network(name: str, module: RelPosMlp, layer: int, grids: Grids) -> Position | None:
    grid = grids.of(name)
    return None if grid is None else _offsets(name, _in_eval(module, lambda: module.table(grid)), layer)


def _distances(name: str, module: Any, layer: int, grids: Grids) -> Position | None:
    """LeViT's: a value for every distance |Δy|, |Δx|, looked up for every pair."""
    biases, index = module.attention_biases, module.attention_bias_idxs
    pairs = as_array(biases[:, index])
    queries, keys = index.shape
    columns = _columns(index)
    key_grid = (keys // columns, columns)
    stride = max(1, round((keys / queries) ** 0.5))
    grid = (-(-key_grid[0] // stride), -(-key_grid[1] // stride))
    if grid[0] * grid[1] != queries or key_grid[0] * key_grid[1] != keys:
        return None
    every = xr.DataArray(
        pairs.reshape(-1, *grid, *key_grid), dims=("head", "query_y", "query_x", "key_y", "key_x"), name="bias"
    )
    arrays = {"distances": labelled(as_array(biases), "head", "distance")}
    return Position(name, "relative", grid, arrays, layer=layer, key_grid=key_grid, _pairs=every)


def _columns(index: Tensor) -> int:
    """How many columns the keys have: from the first query, the number |Δy|·columns + |Δx| of key n is n itself; its right
    neighbour's (or what a stride makes of it) breaks that order first where the second row begins."""
    if len(index) < 2:
        return max(1, isqrt(index.shape[1]))
    second = index[1].tolist()
    start = second.index(0)  # the key on the query itself
    return next((n for n in range(start + 1, len(second)) if second[n] != n - start), len(second))


def _gaussian(name: str, module: GaussianBias, layer: int, grids: Grids) -> Position | None:
    grid = grids.of(name)
    if grid is None:
        return None
    found = _offsets(name, module.table(grid), layer)
    arrays = {
        **found.arrays,
        "amplitude": labelled(as_array(module.amplitude), "head"),
        "sigma": labelled(np.abs(as_array(module.sigma)), "head"),
    }
    return Position(name, "gaussian", grid, arrays, layer=layer, key_grid=grid)


def _decomposed(down: str, across: str) -> Callable[[str, Any, int, Any], Position]:
    def read(name: str, module: Any, layer: int, grids: Grids) -> Position:
        arrays = {
            "down": labelled(as_array(getattr(module, down)), "offset_y", "channel"),
            "across": labelled(as_array(getattr(module, across)), "offset_x", "channel"),
        }
        return Position(name, "decomposed", None, arrays, layer=layer)

    return read


def _has(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: all(isinstance(getattr(module, name, None), (Tensor, nn.Module)) for name in names)


# How a module that holds a bias is recognised, and read. The first that fits counts; more can be put in front.
FORMS: list[tuple[Callable[[nn.Module], bool], Callable[[str, Any, int, Any], Position | None]]] = [
    (lambda module: isinstance(module, GaussianBias), _gaussian),
    (lambda module: isinstance(module, RelPosMlp), _own_network),
    (_has("relative_position_bias_table"), _table),
    (lambda module: isinstance(module, LocalWindowAttention), _shared_by_heads),
    (_has("mlp", "rel_coords_log"), _timm_network),
    (_has("cpb_mlp", "relative_coords_table"), _continuous),
    (_has("continuous_position_bias_mlp", "relative_coords_table"), _continuous),
    (_has("meta_mlp", "relative_coordinates_log"), _paired_network),
    (_has("attention_biases", "attention_bias_idxs"), _distances),
    (_has("rel_pos_h", "rel_pos_w"), _decomposed("rel_pos_h", "rel_pos_w")),
    (_has("height_rel", "width_rel"), _decomposed("height_rel", "width_rel")),
]


def _evaluated(network: nn.Module, coordinates: Tensor) -> Tensor:
    weight = next(network.parameters())
    return _in_eval(network, lambda: network(coordinates.to(device=weight.device, dtype=weight.dtype)))


def _in_eval(module: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """These networks have dropout: a model in training mode would give a draw."""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        return compute()
    finally:
        for one in training:
            one.training = True

"""What of a model's positions only a pass through it tells: grids that biases are made for, embeddings that are computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.relative_position import RelPosBias, RelPosMlp
from spatially.observe.position import Grid, as_pair
from spatially.subject import Subject

EMBEDDING = re.compile(
    r"(?<!rel_)(?<!relative_)(abs(olute)?_)?pos(ition(al)?)?_?(embed(ding)?s?|emb|encoding)\d*(_\w+)?$|^(patch|pixel)_pos$"
)
RELATIVE = re.compile(r"^rel(ative)?_?pos\w*_(idx|index|indices)$")  # which entry of a table each pair of places takes
ROTARY = re.compile(r"rope|rotary", re.IGNORECASE)


class Grids:
    """Grids and embeddings that modules are given or make while an image passes: one pass, and only if any needs it."""

    def __init__(self, subject: Subject | None, model: nn.Module) -> None:
        self._grids: dict[str, Grid] = {}
        self._made: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        asked = {
            name: module
            for name, module in modules.items()
            if isinstance(module, (GaussianBias, RelPosMlp, RelPosBias))
        }
        makers = {
            name: module
            for name, module in modules.items()
            if EMBEDDING.search(name.rpartition(".")[2])
            and not ROTARY.search(type(module).__name__)
            and not isinstance(module, nn.Embedding)
        }
        if subject is not None and (asked or makers):
            self._pass(subject, modules, asked, makers)
        for name in asked:
            self._grids.setdefault(name, _standing_grid(modules, name) or (0, 0))

    def of(self, name: str) -> Grid | None:
        """The grid that a bias is made for."""
        grid = self._grids.get(name)
        return grid if grid and all(grid) else None

    def made_by(self, name: str) -> Tensor | None:
        """The embedding that a module makes, where it is the same for every image."""
        return self._made.get(name)

    def _pass(
        self, subject: Subject, modules: dict[str, nn.Module], asked: dict[str, Any], makers: dict[str, Any]
    ) -> None:
        hooks: list[Any] = []

        def told(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
                pairs = [pair for one in (*arguments, *options.values()) if (pair := as_pair(one)) is not None]
                if pairs and not isinstance(arguments[0] if arguments else None, int):
                    self._grids[name] = pairs[0]

            return hook

        def made(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: Any, output: Any) -> None:
                if isinstance(output, Tensor) and output.ndim in (3, 4) and torch.equal(output[0], output[-1]):
                    self._made[name] = output[:1]

            return hook

        for name in asked:
            owners = (modules[name.rpartition(".")[0]], modules[name])
            hooks += [owner.register_forward_pre_hook(told(name), with_kwargs=True) for owner in owners]
        hooks += [module.register_forward_hook(made(name)) for name, module in makers.items()]
        height, width = subject.preprocessing.input_size
        try:
            # Two images that differ: what comes out the same for both does not come from them.
            subject(torch.stack([torch.zeros(3, height, width), torch.linspace(0, 1, width).expand(3, height, width)]))
        finally:
            for hook in hooks:
                hook.remove()
        for name in asked:
            # A layer that was given its grid beside it (see spatially.surgery.grid) has just been told.
            beside = getattr(getattr(modules[name.rpartition(".")[0]], "grid", None), "size", None)
            if name not in self._grids and beside is not None:
                self._grids[name] = beside


def _standing_grid(modules: dict[str, nn.Module], name: str) -> Grid | None:
    """The grid that a bias or the layer around it names: a window, a square, or the grid of a table."""
    for owner in (modules[name], modules[name.rpartition(".")[0]]):
        for attribute in ("grid", "window_size", "window"):
            if (grid := as_pair(getattr(owner, attribute, None))) is not None:
                return grid
    return None

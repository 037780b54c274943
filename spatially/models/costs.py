"""Parameters and multiplications of every registered model at 224×224, as `spatially models` lists them.

They are counted on meta tensors, without computing anything, and kept in `costs.json`, since counting all takes a minute.
A multiplication with its addition counts once (GMACs, as the papers have it). Write the file anew with

    python -m spatially.models.costs
"""

import json
from dataclasses import dataclass
from importlib.resources import files

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

SIDE = 224


@dataclass(frozen=True)
class Cost:
    """Number of parameters, and multiply-accumulate operations of one image."""

    parameters: int
    macs: int


def count(name: str, *, side: int = SIDE, **options: object) -> Cost:
    """Count a model that timm can create."""
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
        image = torch.empty(1, 3, side, side)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2)


def known() -> dict[str, Cost]:
    """What the file holds."""
    table = json.loads((files(__package__) / "costs.json").read_text())
    return {name: Cost(*cost) for name, cost in table.items()}


if __name__ == "__main__":
    from pathlib import Path

    from spatially.models import CARDS

    lines = [f'  "{name}": [{cost.parameters}, {cost.macs}]' for name in CARDS for cost in [count(name)]]
    Path(__file__).with_name("costs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

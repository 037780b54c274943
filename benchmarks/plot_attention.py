"""Draw what `regular_attention.py --json` wrote: the time of every way by the size of the grid, and the memory floor.

python benchmarks/plot_attention.py benchmarks/results/regular_attention-h200.json docs/images/regular_attention.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from spatially.drawing.style import FAINT, INK, MARKERS, MUTED, SERIES, figure_style


def draw(axes: Axes, rows: list[dict], what: str) -> None:
    """Milliseconds by grid, one line for each way."""
    grids = sorted({row["grid"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    floor = {row["grid"]: row[what]["milliseconds"] / row[what]["over_floor"] for row in rows}
    axes.plot(grids, [floor[grid] for grid in grids], color=FAINT, linestyle=(0, (4, 2)), label="memory floor")
    for number, name in enumerate(names):
        found = {row["grid"]: row[what]["milliseconds"] for row in rows if row["name"] == name}
        ours = name == "ours"
        axes.plot(
            list(found),
            list(found.values()),
            color=INK if ours else SERIES[(number - 1) % len(SERIES)],
            marker=MARKERS[number],
            markersize=4.5 if ours else 3.5,
            linewidth=2.2 if ours else 1.2,
            label="this library" if ours else name,
            zorder=3 if ours else 2,
        )
    axes.set(xscale="log", yscale="log", title=what.replace("+", " + "), xlabel="side of the grid")
    axes.set_xticks(grids, [f"{grid}×{grid}" for grid in grids])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    given = parser.parse_args()
    result = json.loads(given.results.read_text())
    with figure_style():
        figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.3), sharey=True, layout="constrained")
        for axes, what in zip(panels, ("forward", "forward+backward"), strict=True):
            draw(axes, result["rows"], what)
        panels[0].set_ylabel("milliseconds")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        machine, version = result["environment"]["machine"], result["environment"]["torch"]
        figure.supxlabel(f"{machine}, PyTorch {version}", fontsize="small", color=MUTED)
        figure.savefig(given.figure, dpi=200, facecolor="white")


if __name__ == "__main__":
    main()

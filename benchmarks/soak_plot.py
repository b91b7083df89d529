"""Draw what a soak has measured.

python benchmarks/soak_plot.py drawn.json soak.png     # drawn.json of a folder kept by soak.py

Needs the extra `plots`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("Agg")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw "series", with "fault_times_s" as ticks."""
    quantities = list(dict.fromkeys(name.partition(": ")[0] for name in result["series"]))
    figure, axes = pyplot.subplots(
        (len(quantities) + 1) // 2, 2, figsize=(13, 2.7 * ((len(quantities) + 1) // 2))
    )
    for axis, quantity in zip(axes.flat, quantities, strict=False):
        for name, points in result["series"].items():
            kind, _, of = name.partition(": ")
            if kind == quantity and len(points) > 4:
                axis.plot([at / 60 for at, _ in points], [value for _, value in points], label=of)
        for at in result["fault_times_s"]:
            axis.axvline(at / 60, ymax=0.03, color="black", linewidth=0.5)
        axis.set_title(quantity)
        axis.set_xlabel("minutes")
        axis.set_yscale("log" if quantity == "memory, MiB" else "linear")
        axis.legend(frameon=False, fontsize=5, ncols=3)
    for axis in axes.flat[len(quantities) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

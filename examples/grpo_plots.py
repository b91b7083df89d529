"""Pictures and a table of runs of grpo_arithmetic.py, from their JSON files.

python examples/grpo_plots.py run1.json run2.json ... --out docs/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

COLOURS = {"blocking": "#4477aa", "in-flight": "#ee6677"}

Run = Mapping[str, Any]


def draw_rewards(runs: Sequence[Run], path: Path, window: int = 10) -> None:
    """The mean reward of what was generated during each step, smoothed over some steps."""
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for run in runs:
        rewards, mode = run["rewards"], run["settings"]["mode"]
        cuts = [max(0, step - window) for step in range(1, len(rewards) + 1)]
        means = [sum(rewards[a:b]) / (b - a) for b, a in enumerate(cuts, start=1)]
        minutes = [run["minutes"] * step / len(rewards) for step in range(1, len(rewards) + 1)]
        label = f"{mode}, seed {run['settings']['seed']}"
        style = ("-", "--", ":")[(run["settings"]["seed"] - 1) % 3]
        for axis, places in ((by_step, range(1, len(rewards) + 1)), (by_time, minutes)):
            axis.plot(places, means, style, color=COLOURS[mode], label=label, linewidth=1.2)
    by_step.set_xlabel("optimizer steps")
    by_time.set_xlabel("minutes")
    by_step.set_ylabel("mean reward, temperature 1")
    by_step.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_time_line(runs: Sequence[Run], path: Path) -> None:
    """Calls of the engine and training steps of each run, over as many seconds."""
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(9, 1.5 * len(runs)), squeeze=False)
    shown = min(run["time_line"]["seconds"] for run in runs)
    for axis, run in zip(axes[:, 0], runs, strict=True):
        rows = (("trainer", "#ccbb44"), ("engine", "#4477aa"))
        for row, (name, colour) in enumerate(rows):
            spans = [(start, end - start) for start, end in run["time_line"][name]]
            axis.broken_barh(spans, (row - 0.35, 0.7), color=colour, edgecolor="white", lw=0.2)
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.set_xlim(0, shown)
        axis.set_title(run["settings"]["mode"], fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("seconds, from a training step in the middle of the run")
    _save(figure, path)


def table(runs: Sequence[Run]) -> str:
    """The runs as a Markdown table."""
    head = (
        "mode",
        "seed",
        "steps",
        "held-out before",
        "after",
        "minutes",
        "CPU minutes",
        "tokens/s",
    )
    head += ("staleness mean", "max", "samples of several versions", "engine busy", "longest pause")
    lines = [head, ("---",) * len(head)]
    for run in runs:
        settings = run["settings"]
        lines.append(
            (
                settings["mode"],
                settings["seed"],
                len(run["rewards"]),
                f"{run['before']:.1%}",
                f"{run['after']:.1%}",
                f"{run['minutes']:.1f}",
                f"{run['cpu_minutes']:.1f}",
                f"{run['tokens_per_s']:.0f}",
                f"{run['staleness_mean']:.2f}",
                run["staleness_max"],
                f"{run['samples_of_several_versions']:.1%}",
                f"{run['generating']:.0%}",
                f"{run['longest_pause_ms']:.0f} ms",
            )
        )
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures and a table of GRPO runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument(
        "--time", type=Path, nargs="*", metavar="FILE", help="runs for the time line, if others"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all runs")
    args = parser.parse_args()
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.runs]
    runs.sort(key=lambda run: (run["settings"]["mode"], run["settings"]["seed"]))
    timed = [json.loads(path.read_text(encoding="utf-8")) for path in args.time or args.runs]
    first = {run["settings"]["mode"]: run for run in reversed(timed)}
    draw_rewards(runs, args.out / "grpo-rewards.png")
    draw_time_line([first[mode] for mode in COLOURS if mode in first], args.out / "grpo-time.png")
    print(table(runs))
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

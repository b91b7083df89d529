"""GRPO with rollouts by quantised weights, with and without correction, beside bfloat16's.

    python benchmarks/quantization_grpo.py [--steps 60] [--seeds 1,2,3]
        [--rollouts "bfloat16;int8, none;..."] [--json FILE] [--plot FILE]

`examples/grpo_arithmetic.py` in blocking mode, on one thread. The trainer is in float32; its
weights are sent as they are, and the engine rounds them anew after each step. Only the engine's
weights and the loss differ between runs of a seed:

none        The loss takes the rollouts as the trainer's own policy's, as if nothing were rounded.
truncated   Each token's gain is weighted by its ratio to the logprob that the engine reports, the
            quantised policy's, up to 2.

The columns are means over the seeds: the reward of all samples of the first and the last tenth of
the steps, held-out accuracy (greedy, by the engine's weights), the mean divergence of the rollouts
from the trainer's policy, in nats a token, and the largest ratio of a token in the last step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Table, options, record, refuse_unknown
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from grpo_arithmetic import Settings, run

ROLLOUTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"correction": "none"},
    "int8, none": {"quantization": "int8", "correction": "none"},
    "int8, truncated": {"quantization": "int8", "correction": "truncated"},
    "int4 32, none": {"quantization": "int4", "quantization_group": 32, "correction": "none"},
    "int4 32, truncated": {
        "quantization": "int4",
        "quantization_group": 32,
        "correction": "truncated",
    },
}

COLUMNS = {
    "first": "{first:.1%}",
    "last": "{last:.1%}",
    "before": "{before:.1%}",
    "after": "{after:.1%}",
    "KL": "{kl:.1e}",
    "ratio": "{ratio_max:.2f}",
}

Run = dict[str, Any]


def figures_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the columns of the runs of all seeds."""
    tenth = max(len(runs[0]["rewards"]) // 10, 1)
    return {
        "first": statistics.fmean(x for each in runs for x in each["rewards"][:tenth]),
        "last": statistics.fmean(x for each in runs for x in each["rewards"][-tenth:]),
        "before": statistics.fmean(each["before"] for each in runs),
        "after": statistics.fmean(each["after"] for each in runs),
        "kl": statistics.fmean(x for each in runs for x in each["kl_behaviour"]),
        "after_least": min(each["after"] for each in runs),
        "after_most": max(each["after"] for each in runs),
        "ratio_max": statistics.fmean(each["facts_last"]["ratio_max"] for each in runs),
    }


def plot(found: dict[str, list[Run]], file: Path, window: int = 5) -> None:
    """Draw mean rewards by step, with the range of the seeds, and the divergence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    colours = ("#000000", "#4477aa", "#66ccee", "#ee6677", "#ccbb44")
    for (name, runs), colour in zip(found.items(), colours, strict=False):
        for axis, field in zip(axes, ("rewards", "kl_behaviour"), strict=True):
            curves = [
                [statistics.fmean(each[field][max(at - window, 0) : at + 1]) for at in steps]
                for each in runs
                for steps in [range(len(each[field]))]
            ]
            by_step = list(zip(*curves, strict=False))
            places = range(1, len(by_step) + 1)
            axis.plot(places, [*map(statistics.fmean, by_step)], color=colour, label=name)
            ends = [*map(min, by_step)], [*map(max, by_step)]
            axis.fill_between(places, *ends, color=colour, alpha=0.12)
            axis.set_xlabel("optimizer steps")
    axes[0].set_ylabel("mean reward of the rollouts")
    axes[1].set_ylabel("KL of the rollouts from the trainer, nats a token")
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    sizes: dict[str, Any] = {"steps": 60, "seeds": [1, 2, 3], "held_out": 500}
    parser = options(__doc__, rollouts=";".join(ROLLOUTS), plot=Path, **sizes)
    arguments = parser.parse_args()
    names = arguments.rollouts.split(";")
    refuse_unknown(parser, names, ROLLOUTS)
    found: dict[str, list[Run]] = {name: [] for name in names}
    kept = ("settings", "before", "after", "rewards", "kl_behaviour", "facts_last")
    for seed in arguments.seeds:
        for name in names:
            settings = Settings(
                seed=seed,
                steps=arguments.steps,
                held_out=arguments.held_out,
                dtype="bfloat16",
                **ROLLOUTS[name],
            )
            own = run(settings, Console(quiet=True))
            found[name].append({key: own[key] for key in kept})
            print(f"seed {seed}, {name}: {own['after']:.1%}", file=sys.stderr, flush=True)
        figures = {name: figures_of(runs) for name, runs in found.items()}
        record(arguments, figures=figures, runs=found)
    table = Table(COLUMNS, "rollouts, correction")
    for name, of in figures.items():
        table.row(name, of)
    if arguments.plot is not None:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()

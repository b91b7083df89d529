"""Gain from speculation in reinforcement learning: the same run with and without it, in turns.

    python benchmarks/speculation_grpo.py [--batches 16,32,64] [--epochs 8] [--problems 32]
        [--prompts 16] [--samples 8] [--seed 1] [--clock wall] [--json FILE]

GRPO on the bundled model, as `examples/grpo_arithmetic.py` in blocking mode, in float32 on one
thread: sums and differences with a thought, at temperature 1, over the same problems in each epoch,
so that drafts come from samples of the same prompt, in the same batch and in earlier epochs. Two
engines, each with its own trainer, make the same steps, first in alternation. Both must report the
same bits: rewards and facts of each step, and the final weights.

The time is that of generation. `--batches`: samples at once. `x off` of an epoch is the ratio of
its tokens per second; that of the run is the median over all steps, with the 95 % interval
(bootstrap), and again without the first epoch, which has no earlier samples. Tokens a row are the
mean of a step's rows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from harness import interval, options, print_table, record, rotated

from nano_inference import InferenceEngine

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from grpo_arithmetic import (
    Record,
    Settings,
    Speculation,
    blocking_step,
    engine_config,
    make_rollouts,
    start_trainer,
)

CLOCKS: dict[str, Callable[[], int]] = {"wall": time.monotonic_ns, "cpu": time.thread_time_ns}


@dataclass(frozen=True)
class Step:
    """One optimizer step of a lane: its facts and mean reward, tokens, drafts and time."""

    facts: dict[str, float]
    tokens: int
    drafted: int
    accepted: int
    duration_ns: int


class Lane:
    """An engine and a trainer that do a run step by step, until the stack is closed."""

    def __init__(self, settings: Settings, now_ns: Callable[[], int], stack: ExitStack) -> None:
        self._settings = settings
        self._engine = stack.enter_context(InferenceEngine(engine_config(settings)))
        self._rollouts = make_rollouts(settings, self._engine)
        self._rollouts.now_ns = now_ns
        self.trainer: Any = stack.enter_context(start_trainer(settings, self._engine))
        self._record = Record()

    def step(self) -> Step:
        """Do the next step; raises NothingToLearn if all answers of each prompt are alike."""
        counts, before = self._rollouts.counts, replace(self._rollouts.counts)
        self._rollouts.busy.clear()
        facts = blocking_step(self._settings, self._rollouts, self.trainer, self._record)
        return Step(
            facts={**facts, "reward": counts.take_reward()},
            tokens=counts.tokens - before.tokens,
            drafted=counts.drafted - before.drafted,
            accepted=counts.accepted - before.accepted,
            duration_ns=sum(end - start for start, end in self._rollouts.busy),
        )

    def accuracy(self) -> float:
        """Return the accuracy of greedy answers to held-out problems."""
        held_out = self._rollouts.task.chosen(self._settings.split, self._settings.held_out)
        return self._rollouts.accuracy(held_out)


def measure(settings: Settings, epochs: int, now_ns: Callable[[], int]) -> dict[str, Any]:
    """Do both runs, step by step; return their figures.

    Raises:
        AssertionError: Speculation has changed something.
    """
    steps: dict[Speculation, list[Step]] = {"off": [], "auto": []}
    with ExitStack() as stack:
        lanes = {
            kind: Lane(replace(settings, speculation=kind), now_ns, stack)
            for kind in get_args(Speculation)
        }
        before = lanes["off"].accuracy()
        for number in range(settings.steps):
            for kind in rotated(("auto", "off"), number):
                steps[kind].append(lanes[kind].step())
            off, on = (steps[kind][-1] for kind in ("off", "auto"))
            if (off.facts, off.tokens) != (on.facts, on.tokens):
                raise AssertionError(f"step {number}: {on.facts} with speculation, {off.facts}")
        weights = lanes["auto"].trainer.weights()
        for name, weight in lanes["off"].trainer.weights().items():
            if not torch.equal(weight, weights[name]):
                raise AssertionError(f"{name} differs with speculation")
        after = lanes["off"].accuracy()
    size = settings.steps // epochs
    pairs = list(zip(steps["off"], steps["auto"], strict=True))
    return {
        "settings": asdict(settings),
        "before": before,
        "after": after,
        "epochs": [epoch_of(pairs[at : at + size]) for at in range(0, len(pairs), size)],
        "all": ratio_of(pairs),
        "later": ratio_of(pairs[size:]),
    }


def ratio_of(pairs: list[tuple[Step, Step]]) -> dict[str, Any]:
    """Return how many times as fast speculation was, step by step."""
    relative = [off.duration_ns / on.duration_ns for off, on in pairs]
    return {"ratio": statistics.median(relative), "interval": interval(relative)}


def epoch_of(pairs: list[tuple[Step, Step]]) -> dict[str, Any]:
    """Return the figures of some steps, each without and with speculation."""
    tokens = sum(off.tokens for off, _ in pairs)
    seconds = {
        "off": sum(off.duration_ns for off, _ in pairs) / 1e9,
        "auto": sum(on.duration_ns for _, on in pairs) / 1e9,
    }
    drafted, accepted = (sum(on.drafted for _, on in pairs), sum(on.accepted for _, on in pairs))
    return {
        "reward": statistics.fmean(off.facts["reward"] for off, _ in pairs),
        "off_tokens_per_s": tokens / seconds["off"],
        "auto_tokens_per_s": tokens / seconds["auto"],
        "ratio": seconds["off"] / seconds["auto"],
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_a_row": tokens / (tokens - accepted),
    }


COLUMNS = {
    "reward": "{reward:.3f}",
    "off tok/s": "{off_tokens_per_s:.0f}",
    "auto tok/s": "{auto_tokens_per_s:.0f}",
    "x off": "{ratio:.2f}",
    "accepted": "{share:.1%}",
    "tokens a row": "{tokens_a_row:.2f}",
}


def show(found: dict[str, Any]) -> None:
    print(f"at most {found['settings']['batch']} samples at once")
    rows = {
        str(number): epoch | {"share": epoch["accepted"] / max(epoch["drafted"], 1)}
        for number, epoch in enumerate(found["epochs"], 1)
    }
    print_table(COLUMNS, rows, "epoch")
    for name, which in (("all steps", "all"), ("from the second epoch on", "later")):
        low, high = found[which]["interval"]
        print(f"{name}: {found[which]['ratio']:.3f} ({low:.3f}-{high:.3f}) x off")
    print(
        f"greedy, held-out: {found['before']:.1%} before, {found['after']:.1%} after; rewards, "
        "losses and weights are the same bits\n"
    )


def main() -> None:
    sizes = {"epochs": 8, "problems": 32, "prompts": 16, "samples": 8, "seed": 1}
    parser = options(__doc__, batches=[16, 32, 64], clock=("wall", CLOCKS), **sizes)
    arguments = parser.parse_args()
    kinds = ("add-thinking", "sub-thinking")
    size, rest = divmod(arguments.problems * len(kinds), arguments.prompts)
    if rest or arguments.epochs < 2:
        parser.error("an epoch must be a whole number of steps, and --epochs at least 2")
    torch.set_num_threads(1)
    cases = []
    for batch in arguments.batches:
        settings = Settings(
            seed=arguments.seed,
            kinds=kinds,
            problems=arguments.problems,
            steps=arguments.epochs * size,
            groups=arguments.prompts,
            samples=arguments.samples,
            prompts=arguments.prompts,
            most_prompts=arguments.prompts,
            batch=batch,
            max_tokens=40,
            held_out=200,
            deterministic=True,
        )
        cases.append(measure(settings, arguments.epochs, CLOCKS[arguments.clock]))
        show(cases[-1])
    record(arguments, cases=cases)


if __name__ == "__main__":
    main()

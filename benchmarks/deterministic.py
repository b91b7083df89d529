"""Cost of deterministic mode: the same work with it on and off, in alternation.

    python benchmarks/deterministic.py [--repeat 5] [--threads 2] [--json FILE]

Two models: the bundled one, and two layers in the shape of Qwen2.5-0.5B (hidden 896, 14 heads on 2
KV heads, FFN 4,864) with random weights and a vocabulary of 32,768, small enough that the output
layer doesn't dominate. Each in float32 and bfloat16, with three workloads:

    decode 1    one sequence, a token per step
    decode 16   sixteen sequences, a token each per step
    prefill     prompts of 512 tokens, four at once, one token each

The peer is the usual mode in the same run; `x` is the median of the ratios within a repetition.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from cores import BLOCK_SIZE, blocks_for, new_sequence, step_plan
from harness import median_ratio, options, print_table, ratios, record, rotated
from random_models import TWO_LAYERS, random_model

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, load_model, wrap_model

ENDLESS = SamplingParams(temperature=1.0, max_tokens=10_000)
MAX_MODEL_LEN = 640


WORKLOADS = {"decode 1": (1, 128, 24), "decode 16": (16, 128, 12), "prefill": (4, 512, 0)}
"""Sequences that start together, their prompts' tokens, and the steps after the prefill, which are
timed; without steps the prefill is."""


def make_model(name: str, dtype: str) -> LoadedModel:
    """Return the bundled model, or two random layers in the shape of Qwen2.5-0.5B."""
    if name == "tiny":
        config = EngineConfig(dtype=dtype, max_model_len=MAX_MODEL_LEN)  # type: ignore[arg-type]
        return load_model(config)
    return wrap_model(random_model(TWO_LAYERS, getattr(torch, dtype)), MAX_MODEL_LEN)


def run(core: ExecutorCore, sequences: int, prompt: int, steps: int) -> float:
    """Return the microseconds per timed token."""
    core.reset()
    generator = torch.Generator().manual_seed(1)
    blocks = blocks_for(prompt + steps + 1)
    ids = tuple(range(sequences))
    new = []
    for index in ids:
        tokens = torch.randint(5, 700, (prompt,), generator=generator).tolist()
        own = range(index * blocks, (index + 1) * blocks)
        new.append(new_sequence(index, index, tokens, own, ENDLESS))
    start = time.perf_counter()
    core.execute(step_plan(1, ids, prompt, tuple(new)))
    if steps:
        start = time.perf_counter()
        for step in range(steps):
            core.execute(step_plan(2 + step, ids, 1))
    return (time.perf_counter() - start) * 1e6 / (sequences * (steps or prompt))


def measure(model: LoadedModel, repeat: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each workload off and on, and of their ratios."""
    usual = {"block_size": BLOCK_SIZE, "max_batch_size": 64, "dtype": "auto"}
    cores = {
        deterministic: ExecutorCore(
            EngineConfig(deterministic=deterministic, **usual),  # type: ignore[arg-type]
            model=model,
        )
        for deterministic in (True, False)
    }
    table: dict[str, dict[str, Any]] = {}
    for name, work in WORKLOADS.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(repeat + 1):
            for deterministic in rotated(cores, repetition):
                took_us = run(cores[deterministic], *work)
                if repetition:
                    times[deterministic].append(took_us)
        table[name] = {
            "off_us": statistics.median(times[False]),
            "on_us": statistics.median(times[True]),
            "ratio": median_ratio(times[True], times[False]),
            "ratios": [round(ratio, 3) for ratio in ratios(times[True], times[False])],
        }
    return table


def main() -> None:
    threads_text = "of torch; default: as the executor stage chooses"
    arguments = options(__doc__, repeat=7, threads=(0, threads_text)).parse_args()
    cores = torch.get_num_threads()
    results: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for model_name in ("tiny", "two layers of 0.5B"):
        # The stage uses one thread for a model as small as the bundled one.
        torch.set_num_threads(arguments.threads or (1 if model_name == "tiny" else cores))
        for dtype in ("float32", "bfloat16"):
            label = f"{model_name}, {dtype}"
            results[label] = measure(make_model(model_name, dtype), arguments.repeat)
            rows |= {f"{label}, {name}": row for name, row in results[label].items()}
    print_table({"off": "{off_us:.0f}", "on": "{on_us:.0f}", "x": "{ratio:.2f}"}, rows, "us/token")
    arguments.threads = arguments.threads or f"1 for tiny, {cores} else"
    record(arguments, per_token=results)


if __name__ == "__main__":
    main()

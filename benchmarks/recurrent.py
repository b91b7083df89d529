"""Measures a hybrid model beside other engines, and its decode's share of the memory bandwidth.

    python benchmarks/recurrent.py [--workloads W1-short,W2-short] [--peers transformers,llamacpp]
        [--repeat 3] [--threads N] [--python llamacpp=PATH] [--folder DIR] [--json FILE]

The model has the shape Q of `workloads.py`, three layers of Gated DeltaNet for each attention
layer. Engines take turns, as in `run.py`; llama.cpp reads the file of `engines/make_gguf.py`. A
decode step reads the weights, and reads and writes the state of each sequence; the share is that of
these bytes in what a program that only reads reaches on the same threads, measured in the same run.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import options, record, refuse_unknown
from run import PROGRAMS, figures_of, measure, show_machine, start, table
from workloads import SHAPES, WORKLOADS

SHAPE = "Q"


def weight_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of the matrices in bfloat16."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = (shape[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    attention = hidden * (2 * queries + 2 * keys) + queries * hidden
    heads, width = shape["linear_num_value_heads"], 128
    mixer = hidden * (4 * heads * width + 2 * heads) + heads * width * hidden
    mlp = 3 * hidden * shape["intermediate_size"]
    layers = shape["num_hidden_layers"]
    rest = layers // 4 * attention + layers * 3 // 4 * mixer + layers * mlp
    return 2 * (rest + hidden * shape["vocab_size"])


def state_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of one sequence's state: matrices in float32, windows in bfloat16."""
    heads, width = shape["linear_num_value_heads"], 128
    return shape["num_hidden_layers"] * 3 // 4 * heads * width * (4 * width + 2 * 3 * 3)


def shares(
    figures: dict[str, dict[str, list[float]]], states: list[dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return each engine's share of the bandwidth, by workload."""
    bandwidth = statistics.median(each["bytes_per_s"] for each in states if each["bytes_per_s"])
    found: dict[str, dict[str, float]] = {}
    for figure, engines in figures.items():
        workload, _, kind = figure.partition(" ")
        if kind != "decode step, ms":
            continue
        sequences = WORKLOADS[workload].prompts * WORKLOADS[workload].samples
        moved = weight_bytes(SHAPES[SHAPE]) + 2 * sequences * state_bytes(SHAPES[SHAPE])
        found[workload] = {
            engine: moved / (statistics.median(steps) / 1e3) / bandwidth
            for engine, steps in engines.items()
        }
    return found


def main() -> None:
    parser = options(
        __doc__,
        workloads=["W1-short", "W2-short"],
        peers=["transformers", "llamacpp"],
        repeat=3,
        threads=os.cpu_count() or 1,
        folder=Path("build/benchmarks"),
    )
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    arguments = parser.parse_args()
    arguments.shape, arguments.engines = SHAPE, ["ours", *arguments.peers]
    refuse_unknown(parser, arguments.workloads, WORKLOADS)
    refuse_unknown(parser, arguments.engines, PROGRAMS)
    load, started = os.getloadavg()[0], time.time()
    peers, missing = start(arguments)
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer)
        runs, states = measure(peers, arguments.workloads, arguments.repeat, arguments.threads)
    for turns in runs.values():
        for engine in turns.values():
            for turn in engine:
                turn["state"] = ""
    figures = figures_of(runs, "")
    print(f"\n{table(figures, [peer.name for peer in peers])}\n")
    found = shares(figures, states)
    for workload, engines in found.items():
        text = ", ".join(f"{engine} {share:.0%}" for engine, share in engines.items())
        print(f"{workload}: share of the bandwidth: {text}")
    for name, reason in missing.items():
        print(f"left out: {name} ({reason})")
    show_machine(states)
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    print(f"load: {loads['load_before']:.1f} before, {loads['load_after']:.1f} after")
    arguments.engines = {peer.name: peer.about for peer in peers}
    results = {"figures": figures, "shares": found, "turns": runs, "states": states}
    record(arguments, started=started, missing=missing, **loads, **results)


if __name__ == "__main__":
    main()

"""Time of each part of a step, beside its floor by memory and by arithmetic.

    python benchmarks/profile_step.py [--workloads W1,W2] [--repeat 5] [--shape S] [--threads 2]
        [--folder DIR] [--json FILE]

Workloads of `workloads.py` on `InferenceEngine.step` in a loop, as in run.py, with kernels that are
compiled to measure themselves (`PROFILE` in cpu.c). Decode steps and prompts have a table each:

- microseconds of a part in a step, all layers together; medians of all steps;
- the floor: the larger of its bytes (weights, keys and values) over the bandwidth of a program that
  only reads, and of its additions and multiplications over the processor's peak, both measured
  before and after each run; and the floor's share of the time;
- the GB/s and GFLOP/s that the part reaches.

Between the kernels Python runs: `plan` until the layers begin (batching, inputs, embedding, rotary
factors), `between` the kernels of a step, `after` the sampled tokens. It has no floor.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from harness import model_folder, options, print_table, record, refuse_unknown
from timed_engine import TimedEngine
from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests

from nano_inference import EngineConfig, SamplingParams
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import Library

PARTS = ("begin", "norms", "projection", "rotation", "attention", "output", "gate and up", "down")
"""As in cpu.c."""

CALLS = {
    "decoder_layers": "layers",
    "normed_linear": "logits",
    "sample": "sampling",
}

State = dict[str, float]


class Clock:
    """Seconds of the kernels of a step, and of Python before, between and after them."""

    def __init__(self) -> None:
        library, sampling = cpu.library(torch.bfloat16), cpu.sampling_library()
        self._seconds = (cpu.ctypes.c_double * len(PARTS)).in_dll(library, "part_seconds")
        for name in CALLS:
            owner: Any = sampling if name == "sample" else library
            setattr(owner, name, self._timed(CALLS[name], getattr(owner, name)))
        self._parts: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        self._parts = {}
        self._seconds[:] = [0.0] * len(PARTS)
        self._last = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Return the seconds of each part since `begin`."""
        self._add("after", time.perf_counter() - self._last)
        layers = self._parts.pop("layers")
        inside = dict(zip(PARTS[1:], self._seconds[1:], strict=True))
        return {**inside, "waking": layers - sum(inside.values()), **self._parts}

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> None:
            start = time.perf_counter()
            self._add("between" if self._parts else "plan", start - self._last)
            call(*arguments)
            self._last = time.perf_counter()
            self._add(part, self._last - start)

        return timed


def work_of(shape: dict[str, Any], rows: int, read: int, context: float) -> dict[str, State]:
    """Return the bytes and the additions and multiplications of each part of a step.

    Args:
        shape: The model's.
        rows: Tokens of the step.
        read: Tokens whose logits are needed; the last layer computes the others' keys and values.
        context: Tokens that a row attends to, on average.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layers, width = shape["num_hidden_layers"], hidden // heads
    kv = 2 * kv_heads * width
    sequences = read
    weights = {
        "projection": hidden * (hidden + kv),
        "output": hidden * hidden,
        "gate and up": 2 * hidden * inner,
        "down": hidden * inner,
    }
    found = {}
    for part, numbers in weights.items():
        whole = layers if part == "projection" else layers - 1
        tokens = whole * rows + (layers - whole) * read
        found[part] = {"bytes": 2.0 * layers * numbers, "operations": 2.0 * tokens * numbers}
    tokens = (layers - 1) * rows + read
    longest = context if rows == read else 2 * context
    found["attention"] = {
        "bytes": 2.0 * layers * sequences * longest * kv,
        "operations": 4.0 * tokens * context * heads * width,
    }
    numbers = hidden * shape["vocab_size"]
    found["logits"] = {"bytes": 2.0 * numbers, "operations": 2.0 * read * numbers}
    found["sampling"] = {"bytes": 4.0 * read * shape["vocab_size"], "operations": 0.0}
    return found


def run(
    engine: TimedEngine, clock: Clock, workload: Workload, requests: list[Request]
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the times of the steps that compute prompts, and of the others."""
    engine.flush_cache()
    engine.completions.clear()
    for request in requests:
        params = SamplingParams(
            temperature=workload.temperature, max_tokens=request.new_tokens, ignore_eos=True
        )
        engine.add_request(request.token_ids, params, workload.samples)
    steps = []
    while engine.has_pending():
        clock.begin()
        engine.step()
        steps.append(clock.end())
    decodes = requests[0].new_tokens - 1
    return steps[:-decodes], steps[-decodes:]


def table(times: list[dict[str, float]], work: dict[str, State], states: list[State]) -> Any:
    """Return a row for each part, the longest first, and their sum."""
    bandwidth = statistics.median(state["bytes_per_s"] for state in states)
    peak = statistics.median(state["operations_per_s"] for state in states)
    rows = {}
    names = {name: None for step in times for name in step}
    for name in names:
        row: dict[str, Any] = {"us": 1e6 * statistics.median(t.get(name, 0.0) for t in times)}
        if name in work and row["us"]:
            size, operations = work[name]["bytes"], work[name]["operations"]
            floor = max(size / bandwidth, operations / peak if peak else 0.0) * 1e6
            row |= {"floor_us": floor, "share": floor / row["us"]}
            row |= {"gb_s": size / row["us"] / 1e3, "gflop_s": operations / row["us"] / 1e3}
        rows[name] = row
    rows = dict(sorted(rows.items(), key=lambda item: -item[1]["us"]))
    total = 1e6 * statistics.median(sum(step.values()) for step in times)
    floor = sum(row.get("floor_us", 0.0) for row in rows.values())
    return {**rows, "all": {"us": total, "floor_us": floor, "share": floor / total}}


def measure(arguments: Any, folder: Path) -> dict[str, Any]:
    """Return the tables of each workload, and the machine's states."""
    profiled = {
        dtype: tuple(
            Library(each.source, each.processor, each.instructions, f"{each.define} PROFILE")
            for each in libraries
        )
        for dtype, libraries in cpu.LIBRARIES.items()
    }
    cpu.LIBRARIES.update(profiled)
    clock = Clock()
    config = EngineConfig(
        model_path=str(folder), max_model_len=2048, max_batch_size=64, kv_cache_bytes=1 << 29
    )
    engine = TimedEngine(config)
    shape = SHAPES[arguments.shape]
    found = {}
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        prompts: list[dict[str, float]] = []
        decodes: list[dict[str, float]] = []
        states: list[State] = []
        for seed in range(arguments.repeat + 1):
            requests = make_requests(workload, shape["vocab_size"], seed)
            note(states, arguments.threads)
            first, further = run(engine, clock, workload, requests)
            note(states, arguments.threads)
            if seed:  # the first run warms up
                prompts.append({part: sum(s.get(part, 0.0) for s in first) for part in first[0]})
                decodes += further
        tokens = sum(len(request.token_ids) for request in requests)
        read = len(requests) * workload.samples
        length, new = tokens / len(requests), workload.new_tokens[0]
        found[name] = {
            "prompts": table(prompts, work_of(shape, tokens, len(requests), length / 2), states),
            "step": table(decodes, work_of(shape, read, read, length + new / 2), states),
            "states": states,
        }
    return found


def note(states: list[State], threads: int) -> None:
    if machine.note(states, threads) is None:
        raise SystemExit("the floor needs a C compiler")
    states[-1]["operations_per_s"] = machine.operations_per_s(threads)


COLUMNS = {
    "us": "{us:,.0f}",
    "floor us": "{floor_us:,.0f}",
    "share": "{share:.0%}",
    "GB/s": "{gb_s:.1f}",
    "GFLOP/s": "{gflop_s:.0f}",
}


def main() -> None:
    parser = options(
        __doc__,
        workloads=["W1", "W2"],
        shape=("S", [name for name, shape in SHAPES.items() if "model_type" not in shape]),
        repeat=5,
        threads=os.cpu_count() or 1,
        folder=Path("build/benchmarks"),
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.workloads, WORKLOADS)
    torch.set_num_threads(arguments.threads)
    found = measure(arguments, model_folder(arguments.folder, arguments.shape))
    for name, tables in found.items():
        for title in ("prompts", "step"):
            print_table(COLUMNS, tables[title], f"{name}, {title}")
            print()
        for key, scale, unit in (
            ("bytes_per_s", 1e-9, "GB/s"),
            ("operations_per_s", 1e-9, "GFLOP/s"),
            ("round_trip_ns", 1, "ns"),
        ):
            values = sorted(scale * state[key] for state in tables["states"])
            print(f"{statistics.median(values):.3g} {unit} [{values[0]:.3g} to {values[-1]:.3g}]")
        print()
    arguments.folder = arguments.folder.name
    record(arguments, found=found)


if __name__ == "__main__":
    main()

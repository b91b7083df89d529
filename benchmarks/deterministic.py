"""What deterministic mode costs: the same work with it on and off, in alternation.

    python benchmarks/deterministic.py [--repeat 5] [--threads 2] [--json FILE]

Two models: the bundled one, and two layers in the shape of Qwen2.5-0.5B (hidden 896, 14 heads on 2
KV heads, FFN 4,864) with random weights and a vocabulary of 32,768, so that the output layer does
not hide the rest. Each in float32 and bfloat16, with three workloads:

    decode 1    one sequence, a token per step
    decode 16   sixteen sequences, a token each per step
    prefill     prompts of 512 tokens, four at once, one token each

The peer is the usual mode in the same run; `x` is the median of the ratios within a repetition.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_models import TWO_LAYERS, random_model

from nano_inference.bus.messages import NewSequence, RequestInfo, SequenceSpec, StepPlan
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, load_model, wrap_model

INFO = RequestInfo("request", "1-0")
ENDLESS = SamplingParams(temperature=1.0, max_tokens=10_000)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 640


@dataclass(frozen=True)
class Workload:
    """Sequences that start together; what is timed is the prefill, or the steps after it."""

    sequences: int
    prompt: int
    steps: int

    @property
    def timed_tokens(self) -> int:
        return self.sequences * (self.steps or self.prompt)


WORKLOADS = {
    "decode 1": Workload(1, 128, 24),
    "decode 16": Workload(16, 128, 12),
    "prefill": Workload(4, 512, 0),
}


def make_model(name: str, dtype: str) -> LoadedModel:
    """The bundled model, or two random layers in the shape of Qwen2.5-0.5B."""
    if name == "tiny":
        config = EngineConfig(dtype=dtype, max_model_len=MAX_MODEL_LEN)  # type: ignore[arg-type]
        return load_model(config)
    return wrap_model(random_model(TWO_LAYERS, getattr(torch, dtype)), MAX_MODEL_LEN)


def plan(step_id: int, new: tuple[NewSequence, ...], count: int, num_tokens: int) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        new=new,
        seq_ids=tuple(range(count)),
        num_tokens=(num_tokens,) * count,
        grown=(),
        copies=(),
        finished=(),
        ended=(),
        made_ns=0,
    )


def run(core: ExecutorCore, work: Workload) -> float:
    """Microseconds per token."""
    core.reset()
    generator = torch.Generator().manual_seed(1)
    blocks = -(-(work.prompt + work.steps + 1) // BLOCK_SIZE)
    new = tuple(
        NewSequence(
            seq_id=index,
            token_ids=tuple(torch.randint(5, 700, (work.prompt,), generator=generator).tolist()),
            num_generated=0,
            num_cached=0,
            block_ids=tuple(range(index * blocks, (index + 1) * blocks)),
            sampling=ENDLESS,
            sample=SequenceSpec(index, 0, seed=index),
            info=INFO,
        )
        for index in range(work.sequences)
    )
    start = time.perf_counter()
    core.execute(plan(1, new, work.sequences, work.prompt))
    if work.steps:
        start = time.perf_counter()
        for step in range(work.steps):
            core.execute(plan(2 + step, (), work.sequences, 1))
    return (time.perf_counter() - start) * 1e6 / work.timed_tokens


def measure(model: LoadedModel, repeat: int) -> dict[str, dict[str, Any]]:
    """Per workload the medians off and on, and of their ratio."""
    cores = {
        deterministic: ExecutorCore(
            EngineConfig(
                block_size=BLOCK_SIZE, max_batch_size=64, deterministic=deterministic, dtype="auto"
            ),
            model=model,
        )
        for deterministic in (False, True)
    }
    table: dict[str, dict[str, Any]] = {}
    for name, work in WORKLOADS.items():
        for core in cores.values():
            run(core, work)
        times: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(repeat):
            # Whoever comes first in a repetition is not always the same.
            for deterministic in (False, True) if repetition % 2 else (True, False):
                times[deterministic].append(run(cores[deterministic], work))
        ratios = [on / off for off, on in zip(times[False], times[True], strict=True)]
        table[name] = {
            "off_us": statistics.median(times[False]),
            "on_us": statistics.median(times[True]),
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 as the executor stage")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    cores = torch.get_num_threads()
    results: dict[str, Any] = {}
    print(f"{'us/token':44}{'off':>10}{'on':>10}{'x':>8}")
    for model_name in ("tiny", "two layers of 0.5B"):
        # A model as small as the bundled one gets one thread from the stage.
        torch.set_num_threads(arguments.threads or (1 if model_name == "tiny" else cores))
        for dtype in ("float32", "bfloat16"):
            found = measure(make_model(model_name, dtype), arguments.repeat)
            results[f"{model_name}, {dtype}"] = found
            for name, row in found.items():
                label = f"{model_name}, {dtype}, {name}"
                print(f"{label:44}{row['off_us']:10.0f}{row['on_us']:10.0f}{row['ratio']:8.2f}")
    if arguments.json:
        content = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": arguments.threads or f"1 for tiny, {cores} else",
            "per_token": results,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

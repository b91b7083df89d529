"""Cost of LoRA adapters per decode step, beside the same step without any.

    python benchmarks/adapters.py [--seconds 60] [--rows 16] [--rank 16] [--shape S] [--threads 1]
        [--dtype bfloat16] [--device cpu] [--json FILE]

Rows of 32 tokens and more decode on the executor alone, on random weights of a shape of
`workloads.py`. The same rows have no adapter, no adapter again, one adapter, or eight adapters in
turn, each on every linear layer; the eight are computed together, as adapters of small ranks are,
and one after the other. Steps of the kinds alternate one by one, in changing order, so that other
load affects all alike. `x none` is the median of the ratios to the first kind's step within a turn,
with its 95 % interval (bootstrap); the deviation of "none again" from 1 is the noise. "loading" is
the time to put a ninth adapter in place, without reading its files.
"""

from __future__ import annotations

import argparse
import random

import torch
from cores import BLOCK_SIZE, Lane, blocks_for, new_sequence
from harness import against, options, print_table, record, timed
from random_models import random_model
from torch import nn
from workloads import SHAPES

from nano_inference.bus.steps import NewSequence
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.adapters.peft import Adapter, AdapterLimits, adapter_of

KINDS = {"none": 0, "none again": 0, "1": 1, "8": 8, "8, one by one": 8}
PROMPT, STEPS, WARM = 32, 96, 6
BLOCKS = blocks_for(PROMPT + STEPS + 1)
LIMITS = AdapterLimits(16, 1024)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)


class AdapterLane(Lane):
    """Rows with the adapters of each kind."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        dtype = getattr(torch, arguments.dtype)
        model = wrap_model(random_model(SHAPES[arguments.shape], dtype, arguments.device), 1024)
        size = arguments.rows * len(KINDS)
        config = EngineConfig(block_size=BLOCK_SIZE, max_batch_size=size)
        core = ExecutorCore(config, model=model, num_blocks=size * BLOCKS)
        super().__init__(core, arguments.rows, KINDS, PROMPT)
        for number in range(8):
            core.runner.adapters.put(self.adapter(f"a{number}", arguments.rank))

    def adapter(self, id: str, rank: int) -> Adapter:
        """Return random matrices for every linear layer but the output layer."""
        module = self.core.model.module
        output = module.get_output_embeddings()  # type: ignore[operator]
        tensors = {}
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear) and part is not output:
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, part.in_features) * 0.01
                tensors[f"{name}.lora_B.weight"] = torch.randn(part.out_features, rank) * 0.01
        config = {"r": rank, "lora_alpha": rank}
        return adapter_of(id, 1, tensors, config, self.core.model, LIMITS)

    def new_row(self, rng: random.Random, kind: str, row: int, seq_id: int) -> NewSequence:
        place = [*KINDS].index(kind) * self.rows + row
        tokens = [rng.randrange(300, self.core.model.vocab_size) for _ in range(PROMPT)]
        blocks = range(place * BLOCKS, (place + 1) * BLOCKS)
        adapter = f"a{row % KINDS[kind]}" if KINDS[kind] else ""
        return new_sequence(seq_id, place, tokens, blocks, SAMPLING, adapter=adapter)

    def run(self, kind: str, *arguments: object) -> float:
        self.core.runner.adapters._one_by_one = kind == "8, one by one"
        return super().run(kind, *arguments)


def main() -> None:
    arguments = options(
        __doc__,
        rows=16,
        rank=16,
        device="cpu",
        threads=(0, "of torch; 0 for all cores"),
        seconds=(60.0, "of measuring"),
        shape=("S", SHAPES),
        dtype=("bfloat16", ["bfloat16", "float32"]),
    ).parse_args()
    lane = AdapterLane(arguments)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in lane.turns(arguments.seconds, steps=STEPS, warm=WARM):
        for kind, took_ms in turn.items():
            found[kind].append(took_ms)
    if not found["none"]:
        raise SystemExit("no turn was done in this time; give it more --seconds")
    adapter = lane.adapter("ninth", arguments.rank)
    loading_ms = timed(lambda: lane.core.runner.adapters.put(adapter)) * 1e3
    size = adapter.num_bytes / (1 << 20)
    print(f"{arguments.rows} rows, rank {arguments.rank}, {len(found['none'])} turns, ms a step")
    rows = {kind: against(steps, found["none"]) for kind, steps in found.items()}
    interval = "{interval[0]:.3f} {interval[1]:.3f}"
    print_table({"p50": "{median:.2f}", "x none": "{ratio:.3f}", "95 %": interval}, rows)
    print(f"loading: {loading_ms:.0f} ms for {size:.1f} MiB beside eight others")
    record(arguments, steps_ms=found, loading_ms=loading_ms, adapter_mib=size)


if __name__ == "__main__":
    main()

"""What adapters cost a decode step, beside the same step without any.

    python benchmarks/adapters.py [--seconds 60] [--rows 16] [--rank 16] [--shape S] [--threads 1]
        [--dtype bfloat16] [--device cpu] [--json FILE]

Rows of 32 tokens and more decode on the executor alone, on random weights in the shape of
Qwen2.5-0.5B ("S", of `workloads.py`). The same rows have no adapter, no adapter again, all one and
the same, or eight in turn, each of which has every linear layer; the eight are computed together,
as they are where their ranks are small, and one after the other. The kinds' steps take turns one by
one, in changing order, so that whatever else the machine does hits all alike. `x none` is the
median of the ratios to the step of the first kind within such a turn, with its 95 % interval
(bootstrap); what "none again" differs from 1 by is the machine's unrest. "loading" is what it takes
until a ninth adapter is there, without reading its files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import torch
from in_turn import Turns, interval, orders
from random_models import random_model
from torch import nn
from workloads import SHAPES

from nano_inference.bus.messages import NewSequence, RequestInfo, SequenceSpec
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.adapters.peft import Adapter, AdapterLimits, adapter_of

KINDS = {"none": 0, "none again": 0, "1": 1, "8": 8, "8, one by one": 8}
PROMPT, STEPS, WARM = 32, 96, 6
BLOCK_SIZE = 16
BLOCKS = -(-(PROMPT + STEPS + 1) // BLOCK_SIZE)
LIMITS = AdapterLimits(16, 1024)


class Lane:
    """An executor without anything around it, and plans for it made by hand."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rows = arguments.rows
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        dtype = getattr(torch, arguments.dtype)
        model = wrap_model(random_model(SHAPES[arguments.shape], dtype, arguments.device), 1024)
        self.core = ExecutorCore(
            EngineConfig(block_size=BLOCK_SIZE, max_batch_size=self.rows * len(KINDS)),
            model=model,
            num_blocks=self.rows * len(KINDS) * BLOCKS,
        )
        for number in range(8):
            self.core.adapters.put(self.adapter(f"a{number}", arguments.rank))
        self._turns = Turns(self.core)
        self._first_id = 0

    def adapter(self, id: str, rank: int) -> Adapter:
        """Random matrices for every linear layer but the output's."""
        module = self.core.model.module
        output = module.get_output_embeddings()  # type: ignore[operator]
        tensors = {}
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear) and part is not output:
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, part.in_features) * 0.01
                tensors[f"{name}.lora_B.weight"] = torch.randn(part.out_features, rank) * 0.01
        config = {"r": rank, "lora_alpha": rank}
        return adapter_of(id, 1, tensors, config, self.core.model, LIMITS)

    def begin(self, seed: int) -> None:
        """Gives the executor new prompts, and computes them."""
        rng = random.Random(seed)
        finished = tuple(itertools.chain.from_iterable(self._turns.ids.values()))
        for number, (kind, adapters) in enumerate(KINDS.items()):
            new = tuple(
                self._new(rng, number * self.rows + row, f"a{row % adapters}" if adapters else "")
                for row in range(self.rows)
            )
            self._turns.ids[kind] = tuple(one.seq_id for one in new)
            self._run(kind, PROMPT, new, finished)
            finished = ()
        self._first_id += self.rows * len(KINDS)

    def step(self, kind: str) -> float:
        """Milliseconds of one step."""
        start = time.perf_counter()
        self._run(kind, 1)
        return (time.perf_counter() - start) * 1e3

    def _new(self, rng: random.Random, place: int, adapter: str) -> NewSequence:
        vocab_size = self.core.model.vocab_size
        return NewSequence(
            seq_id=self._first_id + place,
            token_ids=tuple(rng.randrange(300, vocab_size) for _ in range(PROMPT)),
            num_generated=0,
            num_cached=0,
            block_ids=tuple(range(place * BLOCKS, (place + 1) * BLOCKS)),
            sampling=SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True),
            sample=SequenceSpec(place, 0, seed=place),
            info=RequestInfo("r", "1-0", adapter=adapter),
        )

    def _run(
        self,
        kind: str,
        num_tokens: int,
        new: tuple[NewSequence, ...] = (),
        finished: tuple[int, ...] = (),
    ) -> None:
        self.core.adapters._one_by_one = kind == "8, one by one"
        self._turns.run(kind, num_tokens, new, finished)


def measure(lane: Lane, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each turn's steps; the first few, which make all warm, do not count."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    turns, until = orders(KINDS), 0.0
    for number in itertools.count():
        lane.begin(number)
        until = until or time.monotonic() + seconds
        for place, order in enumerate(itertools.islice(turns, STEPS)):
            if time.monotonic() > until:
                return found
            for kind in order:
                took = lane.step(kind)
                if number or place >= WARM:
                    found[kind].append(took)
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shape", default="S", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for all cores")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    lane = Lane(arguments)
    found = measure(lane, arguments.seconds)
    if not found["none"]:
        raise SystemExit("no turn was done in this time; give it more --seconds")
    adapter = lane.adapter("ninth", arguments.rank)
    start = time.perf_counter()
    lane.core.adapters.put(adapter)
    loading_ms = (time.perf_counter() - start) * 1e3
    size = adapter.num_bytes / (1 << 20)
    print(f"{arguments.rows} rows, rank {arguments.rank}, {len(found['none'])} turns, ms a step")
    print(f"{'adapters':14} {'p50':>8} {'x none':>8} {'95 %':>16}")
    for kind, steps in found.items():
        ratios = [own / other for own, other in zip(steps, found["none"], strict=True)]
        least, most = interval(ratios)
        median = statistics.median(ratios)
        print(f"{kind:14} {statistics.median(steps):8.2f} {median:8.3f} {least:8.3f} {most:7.3f}")
    print(f"loading: {loading_ms:.0f} ms for {size:.1f} MiB beside eight others")
    if arguments.json:
        content = {"steps_ms": found, "loading_ms": loading_ms, "adapter_mib": size}
        arguments.json.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

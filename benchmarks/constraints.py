"""What a constraint costs a step, beside the same step without one.

    python benchmarks/constraints.py [--seconds 150] [--rows 16] [--threads 1]
        [--temperature 0] [--folder DIR] [--json FILE]

Workload W2 (16 prompts of 128 tokens, 64 new ones, greedy) on random weights in the shape of
Qwen2.5-0.5B, bfloat16, with a vocabulary of 151,936 tokens. The executor has the same prompts once
for each kind of text: any, any again, JSON of a schema with a long text in it, and a text of a
regular expression that nearly every token may go on with. Their steps take turns one by one, in
changing order, so that whatever else the machine does hits all alike. `x any` is the median of the
ratios to the step of the first kind within such a turn, with its 95 % interval (bootstrap), and
what "any again" differs from 1 by is the machine's unrest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import machine
import torch
from in_turn import Turns, interval, orders
from random_models import write_model

from nano_inference.bus.messages import NewSequence, RequestInfo, SequenceSpec
from nano_inference.config import Constraint, EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.text.grammar import GrammarCompiler

INFO = RequestInfo("request", "1-0")
BLOCK_SIZE = 16
PROMPT, CACHED, STEPS = 128, 112, 64
BLOCKS = -(-(PROMPT + STEPS + 1) // BLOCK_SIZE)
SHARED_BLOCKS = CACHED // BLOCK_SIZE
WARM = 8
COMPILED = 9
"""Grammars of each kind whose time to compile is taken."""


def json_of(length: int) -> Constraint:
    """Two fields, of which one is a text at least so long."""
    properties = {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string", "minLength": length},
    }
    return Constraint(json_schema=_object(properties))


def words_of(number: int) -> Constraint:
    return Constraint(regex=f"([a-z]{{2,12}} ){{{number}}}")


def large_json_of(number: int) -> Constraint:
    """About 15 KB."""
    one = {"type": "string", "minLength": 1, "maxLength": number}
    return Constraint(json_schema=_object({f"field_{index}": one for index in range(200)}))


def _object(properties: dict[str, dict[str, object]]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


KINDS: dict[str, Constraint | None] = {
    "any": None,
    "any again": None,
    "JSON schema": json_of(5000),
    "regex": words_of(1000),
}


@dataclass
class Found:
    """Milliseconds of each turn's steps, and how long each waited for its masks; behind each whole
    pass, GB/s and the nanoseconds from core to core and back."""

    steps: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    waits: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    states: list[tuple[float, float]] = field(default_factory=list)


class Lane:
    """An executor without anything around it, and plans for it made by hand."""

    def __init__(self, folder: Path, rows: int, threads: int, temperature: float) -> None:
        self.rows = rows
        self._temperature = temperature
        # The first blocks are those that the prompts of all kinds have in common.
        own = BLOCKS - SHARED_BLOCKS
        if threads:
            torch.set_num_threads(threads)
        self.core = ExecutorCore(
            EngineConfig(
                model_path=str(folder), block_size=BLOCK_SIZE, max_batch_size=rows * len(KINDS)
            ),
            num_blocks=rows * (SHARED_BLOCKS + len(KINDS) * own),
        )
        rng = random.Random(0)
        self._heads = [self._tokens(rng, CACHED) for _ in range(rows)]
        self._turns = Turns(self.core)
        self._first_id = 0

    def begin(self, seed: int) -> None:
        """Gives the executor new prompts, and computes of them what it has not."""
        rng = random.Random(seed)
        tails = [self._tokens(rng, PROMPT - CACHED) for _ in range(self.rows)]
        finished = tuple(itertools.chain.from_iterable(self._turns.ids.values()))
        for number, (kind, constraint) in enumerate(KINDS.items()):
            # All there is to compute once only, in the very first pass.
            cached = CACHED if self._first_id else 0
            new = tuple(
                NewSequence(
                    seq_id=self._first_id + row,
                    token_ids=(*self._heads[row], *tails[row]),
                    num_generated=0,
                    num_cached=cached,
                    block_ids=self._blocks(row, number),
                    sampling=SamplingParams(
                        temperature=self._temperature,
                        max_tokens=10_000,
                        ignore_eos=constraint is None,
                        constraint=constraint,
                    ),
                    sample=SequenceSpec(row, 0, seed=row),
                    info=INFO,
                )
                for row in range(self.rows)
            )
            self._turns.ids[kind] = tuple(one.seq_id for one in new)
            self._first_id += self.rows
            self._turns.run(kind, PROMPT - cached, new, finished)
            finished = ()

    def step(self, kind: str) -> tuple[float, float]:
        """Milliseconds of one step, and of its wait for masks."""
        self.core.constraints.take_waits_ns()
        start = time.perf_counter()
        self._turns.run(kind, 1)
        took = time.perf_counter() - start
        return took * 1e3, sum(self.core.constraints.take_waits_ns()) / 1e6

    def _tokens(self, rng: random.Random, number: int) -> tuple[int, ...]:
        vocab_size = self.core.model.vocab_size
        return tuple(rng.randrange(300, vocab_size) for _ in range(number))

    def _blocks(self, row: int, number: int) -> tuple[int, ...]:
        own = BLOCKS - SHARED_BLOCKS
        shared = range(row * SHARED_BLOCKS, (row + 1) * SHARED_BLOCKS)
        start = self.rows * SHARED_BLOCKS + (number * self.rows + row) * own
        return (*shared, *range(start, start + own))


def measure(lane: Lane, seconds: float) -> Found:
    """Turns for so long, in passes of 64 each; the first few, which make all warm, do not count."""
    found, turns = Found(), orders(KINDS)
    lane.begin(0)
    for order in itertools.islice(turns, WARM):
        for kind in order:
            lane.step(kind)
    until = time.monotonic() + seconds
    for number in itertools.count(1):
        lane.begin(number)
        for order in itertools.islice(turns, STEPS):
            if time.monotonic() > until:
                return found
            for kind in order:
                took, waited = lane.step(kind)
                found.steps[kind].append(took)
                found.waits[kind].append(waited)
        state = machine.measure(torch.get_num_threads())
        if state is not None:
            found.states.append((state.bytes_per_s / 1e9, state.round_trip_ns))
    raise AssertionError


def compile_times(folder: Path, vocab_size: int) -> dict[str, tuple[float, float]]:
    """Milliseconds until a constraint can be followed, and then for its first mask; medians."""
    start = time.perf_counter()
    compiler = GrammarCompiler(folder, vocab_size)
    compiler.make_ready()
    times = {"vocabulary": ((time.perf_counter() - start) * 1e3, 0.0)}
    for name, make in (
        ("JSON schema", json_of),
        ("JSON schema, 15 KB", large_json_of),
        ("regex", words_of),
    ):
        pairs = []
        for number in range(COMPILED):
            # Never the same twice, which would be there.
            start = time.perf_counter()
            matcher = compiler.matcher(make(200 + number))
            compiled = time.perf_counter()
            matcher.compute_bitmask()
            pairs.append((compiled - start, time.perf_counter() - compiled))
        compiled_ms, first_ms = (
            statistics.median(column) * 1e3 for column in zip(*pairs, strict=True)
        )
        times[name] = compiled_ms, first_ms
    return times


def show(found: Found, times: dict[str, tuple[float, float]], rows: int) -> None:
    for name, (compiled_ms, first_ms) in times.items():
        more = f", then {first_ms:.2f} for the first mask" if first_ms else ""
        print(f"{name}: {compiled_ms:.1f} ms to make ready{more}")
    plain = found.steps["any"]
    print(f"\n{rows} rows, {len(plain)} turns, ms a step")
    print(f"{'':12} {'p50':>8} {'p99':>8} {'x any':>8} {'95 %':>16} {'waits, p50':>11} {'p99':>7}")
    for kind, steps in found.steps.items():
        ratios = [own / other for own, other in zip(steps, plain, strict=True)]
        least, most = interval(ratios)
        print(
            f"{kind:12} {statistics.median(steps):8.1f} {p99(steps):8.1f} "
            f"{statistics.median(ratios):8.3f} {least:8.3f} {most:7.3f} "
            f"{statistics.median(found.waits[kind]):11.2f} {p99(found.waits[kind]):7.2f}"
        )
    for number, (gigabytes, trip_ns) in enumerate(found.states):
        part = slice(number * STEPS, (number + 1) * STEPS)
        medians = (
            f"{kind} {statistics.median(steps[part]):.1f}" for kind, steps in found.steps.items()
        )
        print(f"at {gigabytes:.0f} GB/s, {trip_ns:.0f} ns: {', '.join(medians)}")


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for all cores")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=150, help="of measuring")
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            write_model(folder, "S")
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        times = compile_times(folder, vocab_size)
        lane = Lane(folder, arguments.rows, arguments.threads, arguments.temperature)
        found = measure(lane, arguments.seconds)
    show(found, times, arguments.rows)
    if arguments.json:
        content = {
            "compile_ms": times,
            "steps_ms": found.steps,
            "waits_ms": found.waits,
            "states": found.states,
        }
        arguments.json.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

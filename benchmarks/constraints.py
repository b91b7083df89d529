"""Cost of a constraint per decode step, beside the same step without one.

    python benchmarks/constraints.py [--seconds 150] [--rows 16] [--threads 1]
        [--temperature 0] [--folder DIR] [--xgrammar PYTHON] [--json FILE]

Workload W2 (16 prompts of 128 tokens, 64 new ones, greedy) on random weights in the shape of
Qwen2.5-0.5B, bfloat16, with a vocabulary of 151,936 tokens. The executor has the same prompts once
for each kind of text: any, any again, JSON of a schema with a long string, and a regular expression
that nearly every token may continue. Steps of the kinds alternate one by one, in changing order, so
that other load affects all alike. `x any` is the median of the ratios to the first kind's step
within a turn, with its 95 % interval (bootstrap); the deviation of "any again" from 1 is the noise.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
from cores import BLOCK_SIZE, Lane, blocks_for, new_sequence
from harness import against, options, percentile, print_table, record, timed
from random_models import write_model
from workloads import constraint_of, masked_texts, object_schema

from nano_inference.bus.steps import NewSequence
from nano_inference.config import Constraint, EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.text.grammar import GrammarCompiler
from nano_inference.text.tokenizer import load_tokenizer

PROMPT, CACHED, STEPS = 128, 112, 64
SHARED_BLOCKS = CACHED // BLOCK_SIZE
OWN_BLOCKS = blocks_for(PROMPT + STEPS + 1) - SHARED_BLOCKS
WARM = 8
COMPILED = 9
"""Grammars of each kind whose compile time is measured."""


def json_of(length: int) -> Constraint:
    """Return a schema of two fields, one with a string of at least this length."""
    properties = {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string", "minLength": length},
    }
    return Constraint(json_schema=object_schema(properties))


def words_of(number: int) -> Constraint:
    return Constraint(regex=f"([a-z]{{2,12}} ){{{number}}}")


def large_json_of(number: int) -> Constraint:
    """Return a schema of about 15 KB."""
    one = {"type": "string", "minLength": 1, "maxLength": number}
    return Constraint(json_schema=object_schema({f"field_{index}": one for index in range(200)}))


KINDS: dict[str, Constraint | None] = {
    "any": None,
    "any again": None,
    "JSON schema": json_of(5000),
    "regex": words_of(1000),
}


class ConstraintLane(Lane):
    """Rows with the constraint of each kind; the prompts of all kinds share their first blocks."""

    def __init__(self, folder: Path, rows: int, threads: int, temperature: float) -> None:
        if threads:
            torch.set_num_threads(threads)
        core = ExecutorCore(
            EngineConfig(
                model_path=str(folder), block_size=BLOCK_SIZE, max_batch_size=rows * len(KINDS)
            ),
            num_blocks=rows * (SHARED_BLOCKS + len(KINDS) * OWN_BLOCKS),
        )
        super().__init__(core, rows, KINDS, PROMPT)
        self._temperature = temperature
        self._heads = [self._tokens(random.Random(row), CACHED) for row in range(rows)]
        self._cached = 0
        self.waited_ms: dict[str, float] = {}

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self._cached = CACHED  # only the first pass computes the common tokens

    def new_row(self, rng: random.Random, kind: str, row: int, seq_id: int) -> NewSequence:
        number, constraint = [*KINDS].index(kind), KINDS[kind]
        tokens = (*self._heads[row], *self._tokens(rng, PROMPT - CACHED))
        shared = range(row * SHARED_BLOCKS, (row + 1) * SHARED_BLOCKS)
        start = self.rows * SHARED_BLOCKS + (number * self.rows + row) * OWN_BLOCKS
        sampling = SamplingParams(
            temperature=self._temperature,
            max_tokens=10_000,
            ignore_eos=constraint is None,
            constraint=constraint,
        )
        blocks = (*shared, *range(start, start + OWN_BLOCKS))
        return new_sequence(seq_id, row, tokens, blocks, sampling, num_cached=self._cached)

    def run(self, kind: str, *arguments: object) -> float:
        self.core.constraints.take_waits_ns()
        took_ms = super().run(kind, *arguments)
        self.waited_ms[kind] = sum(self.core.constraints.take_waits_ns()) / 1e6
        return took_ms

    def _tokens(self, rng: random.Random, number: int) -> list[int]:
        return [rng.randrange(300, self.core.model.vocab_size) for _ in range(number)]


Found = dict[str, Any]


def measure(lane: ConstraintLane, seconds: float) -> Found:
    """Measure turns for so many seconds, in passes of 64.

    Returns:
        By kind, milliseconds of each turn's steps, and of their waits for masks; for each complete
        pass GB/s and the nanoseconds of a round trip between cores.
    """
    steps, waits = ({kind: list[float]() for kind in KINDS} for _ in range(2))
    states = []
    for number, turn in enumerate(lane.turns(seconds, steps=STEPS, warm=WARM), 1):
        for kind, took_ms in turn.items():
            steps[kind].append(took_ms)
            waits[kind].append(lane.waited_ms[kind])
        if number % STEPS == 0 and (state := machine.measure(torch.get_num_threads())):
            states.append((state.bytes_per_s / 1e9, state.round_trip_ns))
    return {"steps_ms": steps, "waits_ms": waits, "states": states}


def compile_times(folder: Path, vocab_size: int) -> dict[str, tuple[float, float]]:
    """Return milliseconds to compile a constraint, and then for its first mask; medians."""
    compiler = GrammarCompiler(folder, vocab_size)
    times = {"vocabulary": (timed(compiler.make_ready) * 1e3, 0.0)}
    for name, make in (
        ("JSON schema", json_of),
        ("JSON schema, 15 KB", large_json_of),
        ("regex", words_of),
    ):
        compiled, first = [], []
        for number in range(COMPILED):
            constraint = make(200 + number)  # a new one each time, which is not cached
            matchers = []
            compiled.append(timed(lambda c=constraint, m=matchers: m.append(compiler.matcher(c))))
            first.append(timed(matchers[0].compute_bitmask))
        times[name] = statistics.median(compiled) * 1e3, statistics.median(first) * 1e3
    return times


def masks(folder: Path, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds of CPU time by kind: to compile, and of the mask before each byte of a
    text."""
    compiler = GrammarCompiler(folder, vocab_size)
    compiler.make_ready()
    tokenizer = load_tokenizer(folder)
    found = {}
    for kind, text in masked_texts().items():
        own = constraint_of(kind, 30, 0)
        own.pop("gbnf", None)
        start = time.process_time()
        matcher = compiler.matcher(Constraint(**own))
        compiled_ms, masks_ms = (time.process_time() - start) * 1e3, []
        for byte in text:
            start = time.process_time()
            matcher.compute_bitmask()
            masks_ms.append((time.process_time() - start) * 1e3)
            assert matcher.consume_tokens(tokenizer.encode(byte)), f"{kind}: {byte!r} of {text!r}"
        found[kind] = {"compile_ms": compiled_ms, "masks_ms": masks_ms}
    return found


def compare_masks(folder: Path, vocab_size: int, python: str) -> dict[str, Any]:
    """Print and return the masks of llguidance beside those of another Python's xgrammar."""
    program = Path(__file__).parent / "engines" / "xgrammar_masks.py"
    command = [python, str(program), str(folder), str(vocab_size)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    theirs = json.loads(printed.splitlines()[-1])
    by_library = {"llguidance": masks(folder, vocab_size), "xgrammar": theirs["kinds"]}
    rows = {
        f"{kind}, {library}": {"compile_ms": row["compile_ms"]}
        | {"median": statistics.median(row["masks_ms"]), "most": max(row["masks_ms"])}
        for library, kinds in by_library.items()
        for kind, row in kinds.items()
    }
    columns = {"compile": "{compile_ms:.2f}", "mask": "{median:.3f}", "most": "{most:.2f}"}
    print_table(columns, dict(sorted(rows.items())), "ms of CPU time")
    return {"xgrammar": theirs["xgrammar"], **by_library}


COLUMNS = {
    "p50": "{median:.1f}",
    "p99": "{p99:.1f}",
    "x any": "{ratio:.3f}",
    "95 %": "{interval[0]:.3f} {interval[1]:.3f}",
    "waits, p50": "{wait_p50:.2f}",
    "waits, p99": "{wait_p99:.2f}",
}


def show(found: Found, times: dict[str, tuple[float, float]], rows: int) -> None:
    for name, (compiled_ms, first_ms) in times.items():
        more = f", then {first_ms:.2f} for the first mask" if first_ms else ""
        print(f"{name}: {compiled_ms:.1f} ms to make ready{more}")
    plain = found["steps_ms"]["any"]
    print(f"\n{rows} rows, {len(plain)} turns, ms a step")
    table = {}
    for kind, steps in found["steps_ms"].items():
        waits = found["waits_ms"][kind]
        table[kind] = against(steps, plain) | {
            "p99": percentile(steps, 0.99),
            "wait_p50": statistics.median(waits),
            "wait_p99": percentile(waits, 0.99),
        }
    print_table(COLUMNS, table)
    for number, (gigabytes, trip_ns) in enumerate(found["states"]):
        part = slice(number * STEPS, (number + 1) * STEPS)
        medians = (
            f"{kind} {statistics.median(steps[part]):.1f}"
            for kind, steps in found["steps_ms"].items()
        )
        print(f"at {gigabytes:.0f} GB/s, {trip_ns:.0f} ns: {', '.join(medians)}")


def main() -> None:
    arguments = options(
        __doc__,
        rows=16,
        threads=(0, "of torch; 0 for all cores"),
        temperature=0.0,
        seconds=(150.0, "of measuring"),
        folder=(Path, "the model's folder; the model is written if it is missing"),
        xgrammar=(str, "a Python with xgrammar: compare masks alone"),
    ).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            write_model(folder, "S")
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        if arguments.xgrammar:
            found = compare_masks(folder, vocab_size, arguments.xgrammar)
            del arguments.xgrammar, arguments.folder
            record(arguments, masks=found)
            return
        times = compile_times(folder, vocab_size)
        lane = ConstraintLane(folder, arguments.rows, arguments.threads, arguments.temperature)
        found = measure(lane, arguments.seconds)
    show(found, times, arguments.rows)
    record(arguments, compile_ms=times, **found)


if __name__ == "__main__":
    main()

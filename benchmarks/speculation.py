"""Gain from speculation: the same requests with and without it, in turns.

    python benchmarks/speculation.py [--kinds json,tool,predicted,random] [--rows 1,16]
        [--turns 6] [--tokens 96] [--threads 1] [--clock wall] [--folder DIR] [--json FILE]

Random weights in the shape of Qwen2.5-0.5B, bfloat16. Two lanes of one process share the model: one
with `engine.speculation: auto`, with all sources but a draft model, and one without. In each turn
both answer the same new requests, first in alternation; the answers must be equal, token for token.

json: an array of objects of one schema, greedy. Its keys are forced, its values are the model's.
tool: calls of one tool with short arguments.
predicted: text without a constraint; the client predicts nine tokens of ten.
random: unpredictable tokens of random weights at temperature 1.

`x off` is the median over the turns of the ratio of tokens per second of decode steps, with its
95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import against, options, print_table, record, rotated
from random_models import write_model
from workloads import object_schema

from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.bus.parts.speculation import DraftsResult, Prediction
from nano_inference.config import Constraint, EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, LoadedModel

PROMPT = 64
UNKNOWN = 0.1
"""Share of wrong tokens in predictions."""

CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def array_of(properties: dict[str, dict[str, object]]) -> Constraint:
    """Return a schema of so many objects that no answer ends."""
    items = object_schema(properties)
    return Constraint(json_schema={"type": "array", "items": items, "minItems": 1000})


CONSTRAINTS = {
    "json": array_of(
        {
            "identifier": {"type": "integer", "minimum": 0, "maximum": 999},
            "description": {"enum": ["a customer of ours", "a customer of somebody else's"]},
            "is_active": {"type": "boolean"},
            "balance_in_euros": {"type": "integer", "minimum": 0, "maximum": 99},
        }
    ),
    "tool": array_of(
        {
            "name": {"const": "get_current_weather"},
            "arguments": object_schema(
                {
                    "location": {"type": "string", "maxLength": 12},
                    "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                }
            ),
        }
    ),
}


@dataclass
class Ran:
    """One turn of a lane: its tokens; number and time of those in decode steps; drafts."""

    tokens: list[list[int]]
    decoded: int = 0
    duration_ns: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.decoded / self.duration_ns * 1e9


class Lane:
    """Batching and an executor, with or without speculation."""

    def __init__(
        self, config: EngineConfig, now_ns: Callable[[], int], model: LoadedModel | None = None
    ) -> None:
        self.executor = ExecutorCore(config, now_ns=now_ns, model=model)
        self._batching = BatchingCore(config, self.executor.capacity(), steps_ahead=1)
        self._now_ns = now_ns
        self._last_id = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        predictions: Sequence[Sequence[int]],
    ) -> Ran:
        first = self._last_id + 1
        for prompt, prediction in zip(prompts, predictions, strict=True):
            self._last_id += 1
            name = f"r{self._last_id}"
            info = RequestInfo(name, name)
            # By the place in the turn, so that both lanes draw the same numbers.
            spec = SequenceSpec(self._last_id, 0, seed=self._last_id - first)
            self._batching.add(
                AdmittedRequest(
                    *(info, Prompt(tuple(prompt)), sampling, (spec,), "", 0),
                    parts=(Prediction(tuple(prediction)),),
                )
            )
        ran = Ran([[] for _ in prompts])
        while (plan := self._batching.plan(0)) is not None:
            begin_ns = self._now_ns()
            result = self.executor.execute(plan)
            self._batching.absorb(result.summary())
            if all(count == 1 for count in plan.num_tokens):
                ran.duration_ns += self._now_ns() - begin_ns
                ran.decoded += len(result.token_ids)
            for seq_id, token in zip(result.seq_ids, result.token_ids, strict=True):
                ran.tokens[seq_id - first].append(token)
            found = DraftsResult.find(result.parts)
            verified = found.verified if found is not None else ()
            ran.drafted += sum(draft.num_tokens for draft in verified)
            ran.accepted += sum(draft.num_accepted for draft in verified)
        return ran


@dataclass
class Case:
    """One kind of text, at one batch size."""

    kind: str
    rows: int
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def turn(self, number: int, off: Lane, on: Lane, tokens: int) -> None:
        """Let both lanes answer the same requests; raise AssertionError if answers differ."""
        rng = random.Random(f"{self.kind} {self.rows} {number}")
        vocab = off.executor.model.vocab_size
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(self.rows)]
        sampling = SamplingParams(
            temperature=1.0 if self.kind == "random" else 0.0,
            max_tokens=tokens,
            constraint=CONSTRAINTS.get(self.kind),
        )
        predictions: list[list[int]] = [[] for _ in prompts]
        if self.kind == "predicted":
            predictions = [
                [rng.randrange(vocab) if rng.random() < UNKNOWN else token for token in answer]
                for answer in off.run(prompts, sampling, predictions).tokens
            ]
        ran = {
            lane: lane.run(prompts, sampling, predictions) for lane in rotated((on, off), number)
        }
        if ran[on].tokens != ran[off].tokens:
            raise AssertionError(f"{self.kind}: speculation has changed tokens")
        self.off.append(ran[off].rate)
        self.on.append(ran[on].rate)
        self.drafted += ran[on].drafted
        self.accepted += ran[on].accepted

    def report(self) -> dict[str, object]:
        figures = against(self.on, self.off)
        return {
            "kind": self.kind,
            "rows": self.rows,
            "off_tokens_per_s": statistics.median(self.off),
            "on_tokens_per_s": figures["median"],
            "ratio": figures["ratio"],
            "interval": figures["interval"],
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Run all turns of all cases; return their reports."""
    now_ns = CLOCKS[arguments.clock]

    def config(speculation: str) -> EngineConfig:
        return EngineConfig(
            model_path=str(folder),
            dtype="bfloat16",
            max_batch_size=max(arguments.rows),
            speculation=speculation,
        )

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    off = Lane(config("off"), now_ns)
    on = Lane(config("auto"), now_ns, off.executor.model)
    cases = [Case(kind, number) for kind in arguments.kinds for number in arguments.rows]
    for number in range(arguments.turns):
        for case in cases:
            case.turn(number, off, on, arguments.tokens)
    return [case.report() for case in cases]


COLUMNS = {
    "off tok/s": "{off_tokens_per_s:.1f}",
    "on tok/s": "{on_tokens_per_s:.1f}",
    "x off": "{ratio:.3f}",
    "interval": "{interval[0]:.3f}-{interval[1]:.3f}",
    "accepted drafted tokens": "{accepted} of {drafted}",
}


def main() -> None:
    parser = options(
        __doc__,
        kinds=["json", "tool", "predicted", "random"],
        rows=[1, 16],
        turns=6,
        tokens=96,
        threads=0,
        folder=Path,
        clock=("wall", CLOCKS),
    )
    arguments = parser.parse_args()
    if arguments.clock == "cpu" and arguments.threads != 1:
        parser.error("--clock cpu is the time of one thread; add --threads 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "S"
        if not folder.exists():
            write_model(folder, "S")
        reports = measure(arguments, folder)
    print_table(COLUMNS, {f"{each['kind']}, {each['rows']} rows": each for each in reports})
    record(arguments, cases=reports)


if __name__ == "__main__":
    main()

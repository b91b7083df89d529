"""Lookup and draft decoding on one text: ours beside llama.cpp's, in turns.

    python benchmarks/speculation_peers.py --folder DIR --llama-server FILE [--rows 1,16]
        [--kinds edited,new] [--turns 7] [--tokens 128] [--threads 2] [--json FILE]

A model in the shape of Qwen2.5-0.5B with an untied output layer, and a draft model of the same
vocabulary with 128 hidden values and two layers. Both are made here so that their greedy text is
known (`write_known_text_model`): every token has one successor, and in four of five cases the draft
model has the same. So both engines, with any rounding, generate the same text, and their drafts are
right at the same places; tokens are checked.

edited: the prompt has the coming text with one token in twenty changed, as in a request for a file
    with a few changes.
new: the prompt has nothing of the coming text.

Each engine runs three times, once for each mode; in a turn each gets the same new requests, all at
once, in rotating order. Prompts are in each engine's prefix cache before the measurement, which is
that of decoding: from sending to the last answer, llama.cpp's over HTTP on the same machine. `x
off` is the median over the turns of the ratio to the same engine without speculation, for the clock
with its 95 % interval (bootstrap) and for the process's CPU time; `x llama.cpp` is the ratio of
tokens per second to llama.cpp in the same mode. `--llama-lookup` and `--llama-draft` set the length
of llama.cpp's drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import machine
from harness import against, median_ratio, options, print_table, progress, record, rotated
from llama_server import LlamaServer
from random_models import random_successors, write_known_text_model
from workloads import SHAPES, qwen2

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

PROMPT, CONTEXT = 64, 16
"""Random tokens of a prompt, and tokens right before the coming text."""
CHANGED, AGREED = 0.05, 0.8
FIRST = 300
"""The first token of texts; those before are special tokens and bytes."""
MORE = {
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TARGET = SHAPES["S"] | MORE
DRAFT = qwen2(128, 512, 2, (2, 1), TARGET["vocab_size"]) | MORE
MODES = ("off", "lookup", "draft")


class Took(NamedTuple):
    """One turn: seconds of the clock and of the process's CPU, drafted and accepted tokens."""

    wall_s: float
    cpu_s: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Ask:
    """A prompt and its known continuation."""

    prompt: list[int]
    answer: list[int]


Run = Callable[[Sequence[Ask]], Took]


def make_models(folder: Path) -> list[int]:
    """Write both models, if missing, as folders and GGUF; return the target's successors."""
    size = TARGET["vocab_size"]
    successors = random_successors(size, FIRST, seed=1)
    rng = random.Random(2)
    others = [token for token in range(FIRST, size) if rng.random() >= AGREED]
    drafted = list(successors)
    # Each gets the successor of the next one, so that all are wrong.
    for token, other in zip(others, [*others[1:], others[0]], strict=True):
        drafted[token] = successors[other]
    for name, settings, following in (("target", TARGET, successors), ("draft", DRAFT, drafted)):
        if not (folder / name).exists():
            write_known_text_model(folder / name, settings, following)
        if not (folder / f"{name}.gguf").exists():
            program = Path(__file__).parent / "engines" / "make_gguf.py"
            subprocess.run([sys.executable, str(program), str(folder / name)], check=True)
    return successors


def make_asks(successors: list[int], kind: str, rows: int, tokens: int, turn: int) -> list[Ask]:
    rng = random.Random(f"{kind} {rows} {turn}")

    def anything(count: int) -> list[int]:
        return [rng.randrange(FIRST, len(successors)) for _ in range(count)]

    asks = []
    for _ in range(rows):
        text = anything(1)
        while len(text) < CONTEXT + tokens:
            text.append(successors[text[-1]])
        context, answer = text[:CONTEXT], text[CONTEXT:]
        before = []
        if kind == "edited":
            before = [anything(1)[0] if rng.random() < CHANGED else token for token in text]
        prompt = [*anything(PROMPT // 2), *before, *anything(PROMPT // 2), *context]
        asks.append(Ask(prompt, answer))
    return asks


def check(name: str, asked: Ask, found: Sequence[int], tokens: int) -> None:
    """Raise AssertionError unless these are the tokens that follow the prompt."""
    if list(found) != asked.answer[:tokens]:
        raise AssertionError(f"{name} wrote another text, or {len(found)} tokens")


def ours(folder: Path, mode: str, arguments: argparse.Namespace, stack: ExitStack) -> Run:
    more: dict[str, Any] = {
        "off": {},
        "lookup": {"speculation": "auto"},
        "draft": {
            "speculation": "auto",
            "draft_sources": ("prediction",),  # no request has one, so that the model drafts
            "draft_model_path": str(folder / "draft"),
        },
    }[mode]
    config = EngineConfig(
        model_path=str(folder / "target"),
        kv_cache_bytes=1 << 29,
        max_batch_size=max(arguments.rows),
        cpu_threads=arguments.threads,
        **more,
    )
    engine = stack.enter_context(InferenceEngine(config))

    def generate(asks: Sequence[Ask], tokens: int) -> tuple[int, int]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        samples = engine.generate([asked.prompt for asked in asks], sampling)
        for asked, sample in zip(asks, samples, strict=True):
            check(f"ours, {mode},", asked, sample.completion_tokens, tokens)
        return (
            sum(sample.num_draft_tokens for sample in samples),
            sum(sample.num_accepted_draft_tokens for sample in samples),
        )

    return timed_run(generate, arguments.tokens, time.process_time)


def timed_run(
    generate: Callable[[Sequence[Ask], int], tuple[int, int]],
    tokens: int,
    cpu_s: Callable[[], float],
) -> Run:
    """Return a run that caches the prompts, and then measures the generation."""

    def run(asks: Sequence[Ask]) -> Took:
        generate(asks, 1)
        wall_at, cpu_at = time.perf_counter(), cpu_s()
        counts = generate(asks, tokens)
        return Took(time.perf_counter() - wall_at, cpu_s() - cpu_at, *counts)

    return run


def llama(folder: Path, mode: str, arguments: argparse.Namespace, stack: ExitStack) -> Run:
    draft = ["--spec-type", "draft-simple", "-md", folder / "draft.gguf", "-td", arguments.threads]
    more = {
        "off": [],
        "lookup": arguments.llama_lookup.split(),
        "draft": [*draft, *arguments.llama_draft.split()],
    }[mode]
    rows, gguf = max(arguments.rows), folder / "target.gguf"
    size, log = (rows, arguments.threads), folder / f"llama-{mode}.log"
    server = LlamaServer(arguments.llama_server, gguf, *size, stack, *more, log=log)

    def generate(asks: Sequence[Ask], tokens: int) -> tuple[int, int]:
        common = {"n_predict": tokens, "temperature": 0, "ignore_eos": True}
        common |= {"cache_prompt": True, "return_tokens": True}
        bodies = [
            {"prompt": asked.prompt, "id_slot": slot, **common} for slot, asked in enumerate(asks)
        ]
        answers = server.complete(bodies)
        for asked, answer in zip(asks, answers, strict=True):
            check(f"llama.cpp, {mode},", asked, answer["tokens"], tokens)
        drafted, accepted = (
            sum(answer["timings"].get(name, 0) for answer in answers)
            for name in ("draft_n", "draft_n_accepted")
        )
        return drafted, accepted

    return timed_run(generate, arguments.tokens, server.cpu_s)


@dataclass
class Case:
    """One kind of text at one batch size: the turns of each engine in each mode."""

    kind: str
    rows: int
    took: dict[tuple[str, str], list[Took]] = field(default_factory=dict)
    states: list[dict[str, float]] = field(default_factory=list)

    def report(self, tokens: int) -> list[dict[str, Any]]:
        """Return the medians of each engine and mode."""
        reports = []
        for (engine, mode), took in self.took.items():
            off, peer = self.took[engine, "off"], self.took["llama.cpp", mode]
            wall_s, cpu_s = ([each[i] for each in took] for i in range(2))
            faster = against([each.wall_s for each in off], wall_s)
            rates = [self.rows * tokens / one for one in wall_s]
            row = {"kind": self.kind, "rows": self.rows, "engine": engine, "mode": mode}
            row |= {"tokens_per_s": statistics.median(rates), "range": (min(rates), max(rates))}
            row |= {"x_off": faster["ratio"], "interval": faster["interval"]}
            row["cpu_x_off"] = median_ratio((each.cpu_s for each in off), cpu_s)
            row["x_llama"] = median_ratio((each.wall_s for each in peer), wall_s)
            for name in ("drafted", "accepted"):
                row[name] = sum(getattr(one, name) for one in took)
            reports.append(row)
        return reports

    def turns(self) -> dict[str, Any]:
        """Return all measurements."""
        took = {f"{engine} {mode}": turns for (engine, mode), turns in self.took.items()}
        return {"kind": self.kind, "rows": self.rows, "took": took, "states": self.states}


def measure(arguments: argparse.Namespace, stack: ExitStack) -> list[Case]:
    successors = make_models(arguments.folder)
    runs: dict[tuple[str, str], Run] = {}
    for mode in MODES:
        runs["ours", mode] = ours(arguments.folder, mode, arguments, stack)
        runs["llama.cpp", mode] = llama(arguments.folder, mode, arguments, stack)
    names = list(runs)
    cases = [
        Case(kind, rows, {name: [] for name in names})
        for kind in arguments.kinds
        for rows in arguments.rows
    ]
    for turn in range(arguments.turns + 1):  # the first turn warms up
        for case in cases:
            asks = make_asks(successors, case.kind, case.rows, arguments.tokens, turn)
            for name in rotated(names, turn):
                took = runs[name](asks)
                if turn:
                    case.took[name].append(took)
            if turn:
                machine.note(case.states, arguments.threads)
        progress(turn, arguments.turns, "turn")
    return cases


COLUMNS = {
    "tok/s": "{tokens_per_s:.1f}",
    "x off": "{x_off:.2f}",
    "interval": "{interval[0]:.2f}-{interval[1]:.2f}",
    "CPU x off": "{cpu_x_off:.2f}",
    "x llama.cpp": "{x_llama:.2f}",
    "accepted": "{accepted} of {drafted}",
}


def main() -> None:
    parser = options(
        __doc__,
        llama_lookup="--spec-type ngram-simple",
        llama_draft="",
        kinds=["edited", "new"],
        rows=[1, 16],
        turns=7,
        tokens=128,
        threads=2,
    )
    for name in ("--folder", "--llama-server"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cases = measure(arguments, stack)
    reports = [report for case in cases for report in case.report(arguments.tokens)]
    names = ("kind", "rows", "engine", "mode")
    print_table(COLUMNS, {", ".join(str(each[n]) for n in names): each for each in reports})
    record(arguments, reports=reports, turns=[case.turns() for case in cases])


if __name__ == "__main__":
    main()

"""Lookup and draft decoding on one text: ours beside llama.cpp's, in turns.

    python benchmarks/speculation_peers.py --folder DIR --llama-server FILE [--rows 1,16]
        [--kinds edited,new] [--turns 7] [--tokens 128] [--threads 2] [--json FILE]

A model in the shape of Qwen2.5-0.5B with an output layer of its own, and a draft model of the same
vocabulary with 128 hidden values and two layers. Both are made here so that their greedy text is
known (`write_known_text_model`): every token has one that follows it, and in four of five cases the
draft model lets the same follow. So both engines, however they round, write the same text, and
drafts are right in the same places; tokens are checked.

edited: the prompt has the text that is to come, one token in twenty changed, as where a file is
    given and asked for with a few changes.
new: nothing of the text that is to come is in the prompt.

Each engine runs three times, once for each mode; a turn is the same requests for each, all at once,
in rotating order, and each turn has other texts. Prompts are in each engine's prefix cache before
the time is taken, so that it is that of decoding: from sending until the last answer is there,
llama.cpp's over HTTP on the same machine. `x off` is the median over the turns of the ratio to the
same engine without speculation, for the clock with its 95 % interval (bootstrap) and for the
process's CPU time; `x llama.cpp` the same of tokens per second to llama.cpp in the same mode.
llama.cpp's drafts are as long as `--llama-lookup` and `--llama-draft` say.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import machine
from constraint_peers import cpu_ms
from in_turn import interval
from random_models import random_successors, write_known_text_model
from workloads import SHAPES

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

PROMPT, CONTEXT = 64, 16
"""Tokens of a prompt besides the edited text, and those right before the text."""
CHANGED, AGREED = 0.05, 0.8
FIRST = 300
"""The first of the tokens that texts are made of; before are special ones and bytes."""
TARGET = SHAPES["S"] | {
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DRAFT = TARGET | {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODES = ("off", "lookup", "draft")
PORT = 18372
READY_S = 120


class Took(NamedTuple):
    """One turn: seconds of the clock and of the process's CPU, and drafted tokens."""

    wall_s: float
    cpu_s: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Ask:
    """A prompt and what a model writes behind it."""

    prompt: list[int]
    answer: list[int]


Run = Callable[[Sequence[Ask]], Took]


def make_models(folder: Path) -> list[int]:
    """Writes both models, if they are not there, as folders and GGUF; the target's successors."""
    size = TARGET["vocab_size"]
    successors = random_successors(size, FIRST, seed=1)
    rng = random.Random(2)
    others = [token for token in range(FIRST, size) if rng.random() >= AGREED]
    drafted = list(successors)
    # Each of these has the successor of the next of them, so that all of them are wrong.
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


def check(name: str, asked: Ask, told: Sequence[int], tokens: int) -> None:
    """Raises AssertionError unless these are the tokens that follow the prompt."""
    if list(told) != asked.answer[:tokens]:
        raise AssertionError(f"{name} wrote another text, or {len(told)} tokens")


def ours(folder: Path, mode: str, options: argparse.Namespace, stack: ExitStack) -> Run:
    more: dict[str, Any] = {
        "off": {},
        "lookup": {"speculation": "auto"},
        "draft": {
            "speculation": "auto",
            "draft_sources": ("prediction",),  # which no request has, so that the model drafts
            "draft_model_path": str(folder / "draft"),
        },
    }[mode]
    config = EngineConfig(
        model_path=str(folder / "target"),
        kv_cache_bytes=1 << 29,
        max_batch_size=max(options.rows),
        cpu_threads=options.threads,
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

    def run(asks: Sequence[Ask]) -> Took:
        generate(asks, 1)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        counts = generate(asks, options.tokens)
        return Took(time.perf_counter() - wall_s, time.process_time() - cpu_s, *counts)

    return run


def start_llama(folder: Path, mode: str, options: argparse.Namespace, stack: ExitStack) -> int:
    """llama.cpp's server in this mode; its process's id, once it answers."""
    rows, threads = max(options.rows), str(options.threads)
    command = [str(options.llama_server), "-m", str(folder / "target.gguf")]
    command += ["--port", str(PORT + MODES.index(mode)), "-t", threads, "-np", str(rows)]
    command += ["-c", str(rows * 512), "-cram", "0"]
    if mode == "lookup":
        command += options.llama_lookup.split()
    if mode == "draft":
        command += ["--spec-type", "draft-simple", "-md", str(folder / "draft.gguf")]
        command += ["-td", threads, *options.llama_draft.split()]
    log = stack.enter_context((folder / f"llama-{mode}.log").open("w"))
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT + MODES.index(mode)}/health").is_success:
                return process.pid
        except httpx.TransportError:
            pass
        if time.monotonic() > until or process.poll() is not None:
            raise AssertionError(f"llama.cpp does not start; see {log.name}")
        time.sleep(0.2)


def llama(folder: Path, mode: str, options: argparse.Namespace, stack: ExitStack) -> Run:
    pid = start_llama(folder, mode, options, stack)
    url = f"http://127.0.0.1:{PORT + MODES.index(mode)}/completion"
    client = stack.enter_context(httpx.Client(timeout=READY_S))
    pool = stack.enter_context(ThreadPoolExecutor(max(options.rows)))

    def complete(slot: int, asked: Ask, tokens: int) -> tuple[int, int]:
        body = {
            "prompt": asked.prompt,
            "n_predict": tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "id_slot": slot,
            "return_tokens": True,
        }
        told = client.post(url, json=body).raise_for_status().json()
        check(f"llama.cpp, {mode},", asked, told["tokens"], tokens)
        timings = told["timings"]
        return timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)

    def generate(asks: Sequence[Ask], tokens: int) -> tuple[int, int]:
        answers = pool.map(lambda pair: complete(*pair, tokens), enumerate(asks))
        drafted, accepted = zip(*answers, strict=True)
        return sum(drafted), sum(accepted)

    def run(asks: Sequence[Ask]) -> Took:
        generate(asks, 1)
        wall_s, cpu_at = time.perf_counter(), cpu_ms(pid)
        counts = generate(asks, options.tokens)
        wall_s = time.perf_counter() - wall_s
        return Took(wall_s, (cpu_ms(pid) - cpu_at) / 1e3, *counts)

    return run


@dataclass
class Case:
    """One kind of text at one batch size: what each engine in each mode took, turn by turn."""

    kind: str
    rows: int
    took: dict[tuple[str, str], list[Took]] = field(default_factory=dict)
    states: list[machine.State] = field(default_factory=list)

    def report(self, tokens: int) -> list[dict[str, Any]]:
        """Of each engine and mode the medians."""
        reports = []
        for (engine, mode), took in self.took.items():
            off, peer = self.took[engine, "off"], self.took["llama.cpp", mode]
            ratios = [before.wall_s / after.wall_s for before, after in zip(off, took, strict=True)]
            cpu = [before.cpu_s / after.cpu_s for before, after in zip(off, took, strict=True)]
            beside = [theirs.wall_s / own.wall_s for theirs, own in zip(peer, took, strict=True)]
            rates = [self.rows * tokens / one.wall_s for one in took]
            reports.append(
                {
                    "kind": self.kind,
                    "rows": self.rows,
                    "engine": engine,
                    "mode": mode,
                    "tokens_per_s": statistics.median(rates),
                    "range": (min(rates), max(rates)),
                    "x_off": statistics.median(ratios),
                    "interval": interval(ratios),
                    "cpu_x_off": statistics.median(cpu),
                    "x_llama": statistics.median(beside),
                    "drafted": sum(one.drafted for one in took),
                    "accepted": sum(one.accepted for one in took),
                }
            )
        return reports

    def turns(self) -> dict[str, Any]:
        """All that was measured, for the file."""
        took = {f"{engine} {mode}": turns for (engine, mode), turns in self.took.items()}
        states = [asdict(state) for state in self.states]
        return {"kind": self.kind, "rows": self.rows, "took": took, "states": states}


def measure(options: argparse.Namespace, stack: ExitStack) -> list[Case]:
    successors = make_models(options.folder)
    runs: dict[tuple[str, str], Run] = {}
    for mode in MODES:
        runs["ours", mode] = ours(options.folder, mode, options, stack)
        runs["llama.cpp", mode] = llama(options.folder, mode, options, stack)
    names = list(runs)
    cases = [
        Case(kind, rows, {name: [] for name in names})
        for kind in options.kinds.split(",")
        for rows in options.rows
    ]
    for turn in range(options.turns + 1):  # the first one warms up
        first = turn % len(names)
        for case in cases:
            asks = make_asks(successors, case.kind, case.rows, options.tokens, turn)
            for name in names[first:] + names[:first]:
                took = runs[name](asks)
                if turn:
                    case.took[name].append(took)
            if turn and (state := machine.measure(options.threads)):
                case.states.append(state)
        print(f"turn {turn} of {options.turns}", file=sys.stderr, flush=True)
    return cases


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--llama-lookup", default="--spec-type ngram-simple")
    parser.add_argument("--llama-draft", default="")
    parser.add_argument("--kinds", default="edited,new")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.rows = [int(number) for number in options.rows.split(",")]
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = read_options()
    with ExitStack() as stack:
        cases = measure(options, stack)
    reports = [report for case in cases for report in case.report(options.tokens)]
    print(
        f"{'kind':7} {'rows':>4} {'engine':10} {'mode':7} {'tok/s':>7} {'x off':>6} "
        f"{'interval':>11} {'CPU x off':>9} {'x llama.cpp':>11}  accepted"
    )
    for report in reports:
        low, high = report["interval"]
        print(
            f"{report['kind']:7} {report['rows']:4} {report['engine']:10} {report['mode']:7} "
            f"{report['tokens_per_s']:7.1f} {report['x_off']:6.2f} {low:5.2f}-{high:5.2f} "
            f"{report['cpu_x_off']:9.2f} {report['x_llama']:11.2f}  "
            f"{report['accepted']} of {report['drafted']}"
        )
    if options.json:
        content = {
            "threads": options.threads,
            "tokens": options.tokens,
            "llama_lookup": options.llama_lookup,
            "llama_draft": options.llama_draft,
            "reports": reports,
            "turns": [case.turns() for case in cases],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

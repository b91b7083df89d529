"""Conversations whose KV does not fit the device cache, for `kv_tiers.py` and peers."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import random_models
from harness import Worker, percentile, print_table
from workloads import qwen2, random_successors

ENGINES = Path(__file__).parent / "engines"

TURNS, FIRST, QUESTION, ANSWER = 4, 256, 64, 4
"""Turns of a conversation, and tokens: before its first question, of a question, of an answer."""

DEVICE_TOKENS, LONGEST = 10_240, 640
"""The device cache, and the longest sequence."""

VOCABULARY, FIRST_WORD = 8192, 300
SHAPE = qwen2(256, 1024, 6, (4, 2), VOCABULARY) | {
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Small, so that 200 conversations take minutes in float32."""

TOKEN_BYTES = 6 * 2 * 2 * 64 * 4
NAME = "C"


class Engine(NamedTuple):
    """A program of `ENGINES`, its interpreter ("" for this one), and its options."""

    program: str
    peer: str
    options: dict[str, Any]


def engines(disk: Path) -> dict[str, Engine]:
    def ours(**tiers: Any) -> Engine:
        sizes = {"device_bytes": DEVICE_TOKENS * TOKEN_BYTES, "longest": LONGEST, "tiers": tiers}
        return Engine("our_turns.py", "", sizes)

    slots = {"device_tokens": DEVICE_TOKENS, "longest": LONGEST}
    return {
        "without tiers": ours(),
        "host memory": ours(kv_host_bytes=1_500_000_000),
        "disk": ours(kv_disk_path=str(disk), kv_disk_bytes=4_000_000_000),
        "OpenVINO GenAI": Engine("ov_turns.py", "openvino", slots),
        "llama-server, slots alone": Engine(
            "llama_turns.py", "llamacpp", {**slots, "cache_ram_mib": 0}
        ),
        "llama-server, host memory": Engine(
            "llama_turns.py", "llamacpp", {**slots, "cache_ram_mib": 2048}
        ),
    }


def successors() -> list[int]:
    return random_successors(VOCABULARY, FIRST_WORD, seed=1)


def write_model(folder: Path) -> Path:
    """Return the folder of a model whose answers are known, written if it is missing."""
    target = folder.absolute() / NAME
    if not (target / "config.json").is_file():
        target.mkdir(parents=True, exist_ok=True)
        random_models.write_known_text_model(target, SHAPE, successors())
    return target


class Turn(NamedTuple):
    """A prompt, the answer to it, and whether it begins a conversation."""

    prompt: list[int]
    answer: list[int]
    begins: bool


def make_turns(number: int) -> list[Turn]:
    """Return the turns of so many conversations, which alternate at random."""
    rng, following = random.Random(1), successors()

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]

    texts = [tokens(FIRST) for _ in range(number)]
    order = [index for index in range(number) for _ in range(TURNS)]
    rng.shuffle(order)
    turns = []
    for index in order:
        begins = len(texts[index]) == FIRST
        prompt = texts[index] + tokens(QUESTION)
        answer = [following[prompt[-1]]]
        while len(answer) < ANSWER:
            answer.append(following[answer[-1]])
        texts[index] = prompt + answer
        turns.append(Turn(prompt, answer, begins))
    return turns


def run(
    engine: Engine, python: str, folder: Path, threads: int, turns: list[Turn]
) -> dict[str, Any]:
    """Return an engine's figures.

    Raises:
        EOFError: It can't start, or has ended.
        AssertionError: An answer is wrong.
    """
    options = json.dumps({"folder": str(folder), "threads": threads, **engine.options})
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    firsts: dict[bool, list[float]] = {True: [], False: []}
    warm_up = list(range(FIRST_WORD, FIRST_WORD + FIRST))
    log = folder.with_name(f"{Path(engine.program).stem}.log").open("w")
    command = [python, ENGINES / engine.program, options]
    with log, Worker(*command, stderr=log, env=environment) as worker:
        about = worker.answer()
        for _ in range(3):
            worker.ask({"prompt": warm_up, "tokens": ANSWER})
        began, inside = time.perf_counter(), 0.0
        for turn in turns:
            found = worker.ask({"prompt": turn.prompt, "tokens": ANSWER})
            assert found["tokens"] == turn.answer, f"{about['version']} has computed other tokens"
            firsts[turn.begins].append(1e3 * found["first_s"])
            inside += found["total_s"]
        total_s = time.perf_counter() - began
    every = firsts[True] + firsts[False]
    return {
        **about,
        "first_p50": statistics.median(every),
        "first_p95": percentile(every, 0.95),
        "begins_p50": statistics.median(firsts[True]),
        "later_p50": statistics.median(firsts[False]),
        "later_p95": percentile(firsts[False], 0.95),
        "total_s": total_s,
        "inside_s": inside,
        "load_average": os.getloadavg()[0],
    }


def compare(
    folder: Path, number: int, threads: int, pythons: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the figures of each engine, and the reason for each missing one."""
    model, turns = write_model(folder), make_turns(number)
    rows, missing = {}, {}
    with tempfile.TemporaryDirectory(dir=folder) as disk:
        for name, engine in engines(Path(disk)).items():
            python = pythons.get(engine.peer, "") if engine.peer else sys.executable
            if not python:
                missing[name] = f"no --python {engine.peer}=PATH"
                continue
            try:
                rows[name] = run(engine, python, model, threads, turns)
                print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
            except (EOFError, subprocess.SubprocessError, AssertionError) as error:
                missing[name] = str(error)
    columns = {
        "first p50": "{first_p50:.1f}",
        "p95": "{first_p95:.1f}",
        "of turn 1, p50": "{begins_p50:.1f}",
        "of later ones, p50": "{later_p50:.1f}",
        "p95 ": "{later_p95:.1f}",
        "total, s": "{total_s:.1f}",
    }
    print_table(columns, rows, f"{number} conversations, {threads} threads, ms")
    for name, reason in missing.items():
        print(f"left out: {name} ({reason})")
    return rows, missing

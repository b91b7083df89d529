"""What one JSON schema costs: ours beside llama.cpp's grammar and OpenVINO's structured output.

    python benchmarks/constraint_peers.py --folder DIR [--llama-server FILE] [--openvino PYTHON]

Each engine decodes 16 sequences of the same random model, greedily, without a schema and with it,
in turn. Compared is the time with over without, of the clock and of its process' CPU, which depends
less on what else the machine does; prompts of a few tokens, and whatever each makes of the schema
anew for each request, are in both. The folder is a model of `random_models.py`; llama.cpp reads
DIR.gguf, which `engines/make_gguf.py` makes of it, and OpenVINO GenAI, in an environment of its
own, DIR-openvino, which optimum-cli makes (README.md).

They do not do the same. llama.cpp takes a token without the grammar and asks it only where that
does not fit, and its logprobs are the model's; ours masks all logits, so that the logprobs are
those of the policy that is sampled from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nano_inference import Constraint, EngineConfig, InferenceEngine, SamplingParams

SCHEMA = {
    "type": "object",
    # llama.cpp takes no more than 2,000 repetitions.
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string", "minLength": 1500},
    },
    "required": ["id", "text"],
    "additionalProperties": False,
}
PORT = 18371
PROMPT_TOKENS = 8
READY_S = 120


class Times(NamedTuple):
    """Milliseconds for each token of all sequences."""

    wall: float
    cpu: float


Measure = Callable[[bool, int], Times]


@dataclass(frozen=True)
class Work:
    folder: Path
    rows: int
    tokens: int
    threads: int
    temperature: float


def prompts(rows: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 4_000) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]


def cpu_ms(pid: int) -> float:
    """CPU time that a process has taken, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def ours(work: Work, stack: ExitStack) -> Measure:
    config = EngineConfig(
        model_path=str(work.folder), kv_cache_bytes=1 << 28, cpu_threads=work.threads
    )
    engine = stack.enter_context(InferenceEngine(config))

    def measure(constrained: bool, seed: int) -> Times:
        constraint = Constraint(json_schema=SCHEMA) if constrained else None
        wall_start, start = time.perf_counter(), time.process_time()
        for row, prompt in enumerate(prompts(work.rows, seed)):
            sampling = SamplingParams(
                temperature=work.temperature,
                max_tokens=work.tokens,
                seed=seed + row,
                ignore_eos=constraint is None,
                constraint=constraint,
            )
            engine.add_request(prompt, sampling)
        while engine.has_pending():
            engine.step()
        wall, cpu = time.perf_counter() - wall_start, time.process_time() - start
        return Times(wall * 1e3 / work.tokens, cpu * 1e3 / work.tokens)

    return measure


def llama(server: Path, work: Work, stack: ExitStack) -> Measure:
    gguf, rows, threads = work.folder.with_suffix(".gguf"), work.rows, str(work.threads)
    command = [str(server), "-m", str(gguf), "--port", str(PORT), "-np", str(rows), "-t", threads]
    command += ["-c", str(rows * 512), "-cram", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
            break
        except OSError:
            if time.monotonic() > until or process.poll() is not None:
                raise
            time.sleep(0.2)
    pool = stack.enter_context(ThreadPoolExecutor(rows))

    def complete(body: dict[str, object]) -> None:
        url, data = f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            told = json.load(answer)
        if told["tokens_predicted"] != work.tokens:
            raise AssertionError(f"llama.cpp ended after {told['tokens_predicted']} tokens")

    def measure(constrained: bool, seed: int) -> Times:
        more = {"json_schema": SCHEMA} if constrained else {"ignore_eos": True}
        bodies = [
            {
                "prompt": prompt,
                "n_predict": work.tokens,
                "seed": seed + row,
                "temperature": work.temperature,
                "samplers": ["temperature"],
                "cache_prompt": False,
                **more,
            }
            for row, prompt in enumerate(prompts(rows, seed))
        ]
        wall_start, start = time.perf_counter(), cpu_ms(process.pid)
        for _ in pool.map(complete, bodies):
            pass
        wall = (time.perf_counter() - wall_start) * 1e3
        return Times(wall / work.tokens, (cpu_ms(process.pid) - start) / work.tokens)

    return measure


def openvino(python: Path, work: Work, stack: ExitStack) -> Measure:
    converted = work.folder.with_name(work.folder.name + "-openvino")
    program = Path(__file__).parent / "engines" / "ov_constraint.py"
    process = stack.enter_context(
        subprocess.Popen(
            [str(python), str(program), str(converted), str(work.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    asking, answers = process.stdin, process.stdout
    assert asking is not None
    assert answers is not None

    def measure(constrained: bool, seed: int) -> Times:
        asked = {
            "prompts": prompts(work.rows, seed),
            "tokens": work.tokens,
            "temperature": work.temperature,
            "schema": json.dumps(SCHEMA) if constrained else None,
        }
        print(json.dumps(asked), file=asking, flush=True)
        took = json.loads(answers.readline())
        return Times(took["wall_ms"] / work.tokens, took["cpu_ms"] / work.tokens)

    return measure


def show(found: dict[str, list[tuple[Times, Times]]]) -> None:
    print(f"{'ms a token':10} {'':4} {'without':>8} {'with it':>8} {'ratio':>7}  least to most")
    for name, pairs in found.items():
        for kind in Times._fields:
            columns = [(getattr(before, kind), getattr(after, kind)) for before, after in pairs]
            plain, constrained = (
                statistics.median(column) for column in zip(*columns, strict=True)
            )
            ratios = sorted(after / before for before, after in columns)
            print(
                f"{name:10} {kind:4} {plain:8.1f} {constrained:8.1f} "
                f"{statistics.median(ratios):7.3f}  {ratios[0]:.3f} to {ratios[-1]:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--openvino", type=Path, help="the Python that has openvino_genai")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    work = Work(asked.folder, asked.rows, asked.tokens, asked.threads, asked.temperature)
    with ExitStack() as stack:
        engines = {"ours": ours(work, stack)}
        if asked.llama_server:
            engines["llama.cpp"] = llama(asked.llama_server, work, stack)
        if asked.openvino:
            engines["OpenVINO"] = openvino(asked.openvino, work, stack)
        found: dict[str, list[tuple[Times, Times]]] = {name: [] for name in engines}
        for number in range(asked.rounds + 1):
            for name, measure in engines.items():
                # Never the same prompts twice, which a cache would have.
                plain, constrained = measure(False, 2 * number), measure(True, 2 * number + 1)
                if number:
                    found[name].append((plain, constrained))
            print(f"round {number} of {asked.rounds}", file=sys.stderr, flush=True)
    show(found)


if __name__ == "__main__":
    main()

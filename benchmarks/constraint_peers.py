"""Cost of one JSON schema: ours beside llama.cpp's grammar and OpenVINO's structured output.

    python benchmarks/constraint_peers.py --folder DIR [--llama-server FILE] [--openvino PYTHON]

Each engine decodes 16 sequences of the same random model, greedily, without and with a schema in
turn. The result is the ratio of the times with and without it, of the clock and of the process's
CPU, which depends less on other load; both include prompts of a few tokens, and each engine's
preparation of the schema per request. The folder is a model of `random_models.py`; llama.cpp reads
DIR.gguf, made by `engines/make_gguf.py`, and OpenVINO GenAI, in its own environment, DIR-openvino,
made by optimum-cli (README.md).

The engines differ. llama.cpp samples without the grammar, consults it only if the token doesn't
fit, and returns the model's logprobs; ours masks all logits, so that logprobs are those of the
policy that is sampled.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from harness import Worker, against, options, print_table, progress, record
from llama_server import LlamaServer
from workloads import object_schema

from nano_inference import Constraint, EngineConfig, InferenceEngine, SamplingParams

SCHEMA = object_schema(
    {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string", "minLength": 1500},  # llama.cpp allows at most 2,000
    }
)
PROMPT_TOKENS = 8


class Times(NamedTuple):
    """Milliseconds per token of all sequences."""

    wall: float
    cpu: float


Measure = Callable[[bool, int], Times]


def prompts(rows: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 4_000) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]


def ours(work: Namespace, stack: ExitStack) -> Measure:
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


def llama(program: Path, work: Namespace, stack: ExitStack) -> Measure:
    gguf = work.folder.with_suffix(".gguf")
    log = work.folder.with_name("llama-server.log")
    server = LlamaServer(program, gguf, work.rows, work.threads, stack, log=log)

    def measure(constrained: bool, seed: int) -> Times:
        common = {"n_predict": work.tokens, "temperature": work.temperature, "cache_prompt": False}
        common |= {"json_schema": SCHEMA} if constrained else {"ignore_eos": True}
        bodies = [
            {"prompt": prompt, "seed": seed + row, **common}
            for row, prompt in enumerate(prompts(work.rows, seed))
        ]
        wall_start, start = time.perf_counter(), server.cpu_s()
        answers = server.complete(bodies)
        wall, cpu = time.perf_counter() - wall_start, server.cpu_s() - start
        for answer in answers:
            if answer["tokens_predicted"] != work.tokens:
                raise AssertionError(f"llama.cpp ended after {answer['tokens_predicted']} tokens")
        return Times(wall * 1e3 / work.tokens, cpu * 1e3 / work.tokens)

    return measure


def openvino(python: Path, work: Namespace, stack: ExitStack) -> Measure:
    converted = work.folder.with_name(work.folder.name + "-openvino")
    program = Path(__file__).parent / "engines" / "ov_constraint.py"
    worker = stack.enter_context(Worker(python, program, converted, work.threads))

    def measure(constrained: bool, seed: int) -> Times:
        asked = {
            "prompts": prompts(work.rows, seed),
            "tokens": work.tokens,
            "temperature": work.temperature,
            "schema": json.dumps(SCHEMA) if constrained else None,
        }
        took = worker.ask(asked)
        return Times(took["wall_ms"] / work.tokens, took["cpu_ms"] / work.tokens)

    return measure


COLUMNS = {
    "without": "{without:.1f}",
    "with it": "{median:.1f}",
    "ratio": "{ratio:.3f}",
    "least to most": "{ratios[0]:.3f} to {ratios[1]:.3f}",
}


def show(found: dict[str, list[tuple[Times, Times]]]) -> None:
    rows = {}
    for name, pairs in found.items():
        for kind in Times._fields:
            plain, constrained = (
                [getattr(each, kind) for each in column] for column in zip(*pairs, strict=True)
            )
            row = against(constrained, plain)
            rows[f"{name}, {kind}"] = row | {"without": statistics.median(plain)}
    print_table(COLUMNS, rows, "ms a token")


def main() -> None:
    parser = options(
        __doc__,
        llama_server=Path,
        openvino=(Path, "the Python with openvino_genai"),
        rows=16,
        tokens=32,
        rounds=5,
        threads=1,
        temperature=0.0,
    )
    parser.add_argument("--folder", type=Path, required=True)
    work = parser.parse_args()
    with ExitStack() as stack:
        engines = {"ours": ours(work, stack)}
        if work.llama_server:
            engines["llama.cpp"] = llama(work.llama_server, work, stack)
        if work.openvino:
            engines["OpenVINO"] = openvino(work.openvino, work, stack)
        found: dict[str, list[tuple[Times, Times]]] = {name: [] for name in engines}
        for number in range(work.rounds + 1):
            for name, measure in engines.items():
                # New prompts each time, which no cache has.
                plain, constrained = measure(False, 2 * number), measure(True, 2 * number + 1)
                if number:
                    found[name].append((plain, constrained))
            progress(number, work.rounds, "round")
    show(found)
    content = {name: [[*map(tuple, pair)] for pair in pairs] for name, pairs in found.items()}
    record(work, ms_per_token=content)


if __name__ == "__main__":
    main()

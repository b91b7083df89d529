"""What a constraint costs each step, beside the same step without one.

    python benchmarks/constraints.py [--rows 16] [--tokens 64] [--rounds 7] [--folder DIR]

Random weights in the shape of Qwen2.5-0.5B, bfloat16, with a vocabulary of 151,936 tokens: a batch
of sequences decodes without a constraint, then as JSON with a long text in it, then as a text of
one regular expression, in turn. Only steps in which every sequence decodes count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from random_models import write_model

from nano_inference import Constraint, EngineConfig, InferenceEngine, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "text": {"type": "string", "minLength": 5000}},
    "required": ["id", "text"],
    "additionalProperties": False,
}
KINDS: dict[str, Constraint | None] = {
    "none": None,
    "JSON schema": Constraint(json_schema=SCHEMA),
    "regex": Constraint(regex="([a-z]{2,12} ){1000}"),
}
# The first steps compute the prompts.
FIRST_STEPS = 4


def decode(engine: InferenceEngine, kind: str, rows: int, tokens: int, seed: int) -> list[float]:
    """Milliseconds of each step that only decodes."""
    rng = random.Random(seed)
    constraint = KINDS[kind]
    for row in range(rows):
        prompt = [rng.randrange(300, 100_000) for _ in range(64)]
        params = SamplingParams(
            max_tokens=tokens, seed=seed + row, ignore_eos=constraint is None, constraint=constraint
        )
        engine.add_request(prompt, params)
    steps: list[float] = []
    while engine.has_pending():
        start = time.perf_counter()
        finished = engine.step()
        steps.append((time.perf_counter() - start) * 1e3)
        for sample in finished:
            if len(sample.completion_tokens) != tokens:
                raise AssertionError(f"{kind}: it ended after {len(sample.completion_tokens)}")
    return steps[FIRST_STEPS:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            write_model(folder, "S")
        found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
        first: dict[str, float] = {}
        with InferenceEngine(
            EngineConfig(model_path=str(folder), kv_cache_bytes=1 << 28)
        ) as engine:
            for number in range(arguments.rounds + 1):
                for kind in KINDS:
                    start = time.perf_counter()
                    steps = decode(engine, kind, arguments.rows, arguments.tokens, number * 1000)
                    if number:
                        found[kind].append(steps)
                    else:
                        first[kind] = time.perf_counter() - start
                print(f"round {number} of {arguments.rounds}", flush=True)
    print(
        f"\n{arguments.rows} rows: {'ms a step, p50':>24} {'p99':>7} {'of none':>8} {'first, s':>9}"
    )
    for kind, rounds in found.items():
        every = sorted(step for steps in rounds for step in steps)
        share = statistics.median(
            statistics.median(own) / statistics.median(plain)
            for own, plain in zip(rounds, found["none"], strict=True)
        )
        p50, p99 = statistics.median(every), every[int(len(every) * 0.99)]
        print(f"{kind:12} {p50:20.1f} {p99:7.1f} {share:8.3f} {first[kind]:9.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"first_s": first, "steps_ms": found}) + "\n")


if __name__ == "__main__":
    main()

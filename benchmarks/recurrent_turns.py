"""Tokens that each turn of a conversation computes, with snapshots of recurrent state and without.

    python benchmarks/recurrent_turns.py [--turns 30] [--prompt 40] [--completion 24] [--json FILE]
        [--llamacpp PYTHON]

Random weights in a small shape of Qwen3.5's text part (Gated DeltaNet, attention in every fourth
layer). Each turn's prompt is the conversation so far and `--prompt` new tokens; at last the last
one is sent again with its last 10 tokens changed. The same conversation is held with
`engine.state_snapshots_bytes: 0`, so that each turn computes all; the tokens and logprobs must have
the same bits. Times are processor time, of all threads.

`--llamacpp` names a Python with llama-cpp-python, which holds the conversation in one context; the
`gguf` package is needed here to write the model for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import options, print_table, record
from random_models import random_model, write_tokenizer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 4_096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

ENGINES = Path(__file__).parent / "engines"


def main() -> None:
    parser = options(__doc__, turns=30, prompt=40, completion=24)
    parser.add_argument("--llamacpp", metavar="PYTHON")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        random_model(SHAPE, torch.float32).save_pretrained(folder)
        write_tokenizer(Path(folder), SHAPE["vocab_size"])
        for name, more in (
            ("with snapshots", {}),
            ("without", {"state_snapshots_bytes": 0}),
        ):
            settings = EngineConfig(
                model_path=folder, max_model_len=32_768, max_batch_size=8, **more
            )
            with InferenceEngine(settings) as engine:
                rows[name], output = converse(engine, args.turns, args.prompt, args.completion)
                outputs.append(output)
        if args.llamacpp:
            rows["llama.cpp"] = by_llamacpp(args, folder)
    assert outputs[0] == outputs[1], "a snapshot has changed the bits"
    columns = {
        "tokens": "{tokens:,}",
        "computed": "{computed:,}",
        "2nd turn": "{second:,}",
        "last turn": "{last:,}",
        "edited": "{edited:,}",
        "snapshots": "{snapshots:,}",
        "s": "{seconds:.1f}",
    }
    print_table(columns, rows, "tokens of prompts")
    record(args, shape=SHAPE, rows=rows)


def converse(
    engine: InferenceEngine, num_turns: int, num_prompt: int, num_completion: int
) -> tuple[dict[str, Any], list[Any]]:
    """Hold a conversation; return its numbers, and the tokens and logprobs of each turn."""
    text: list[int] = []
    computed: list[int] = []
    output = []
    num_tokens = 0
    sampling = SamplingParams(temperature=0, max_tokens=num_completion, ignore_eos=True)

    def answer(prompt: list[int]) -> tuple[int, ...]:
        engine.add_request(prompt, sampling)
        samples = []
        while engine.has_pending():
            samples += engine.step()
        output.append((samples[0].completion_tokens, samples[0].logprobs))
        computed.append(engine._batching.take_counters().prefilled)
        return samples[0].completion_tokens

    began = time.process_time()
    for turn in range(num_turns):
        text += [2 + (turn * 131 + index * 7) % 4_000 for index in range(num_prompt)]
        num_tokens += len(text)
        last, text = text, [*text, *answer(text)]
    answer([*last[:-10], *range(3_000, 3_010)])
    numbers = {
        "tokens": num_tokens,
        "computed": sum(computed[:-1]),
        "second": computed[1],
        "last": computed[-2],
        "edited": computed[-1],
        "snapshots": engine._batching.take_counts()["states"]["taken"],
        "seconds": time.process_time() - began,
    }
    return numbers, output


def by_llamacpp(args: Any, folder: str) -> dict[str, Any]:
    """Return the numbers of llama.cpp, in a process of its own."""
    subprocess.run([sys.executable, ENGINES / "make_gguf.py", folder, "F32"], check=True)
    sizes = map(str, (args.turns, args.prompt, args.completion))
    program = [args.llamacpp, ENGINES / "llama_conversation.py", f"{folder}.gguf", *sizes]
    found = subprocess.run(program, check=True, capture_output=True, text=True)
    Path(f"{folder}.gguf").unlink()
    numbers: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return numbers


if __name__ == "__main__":
    main()

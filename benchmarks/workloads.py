"""The workloads and model shapes of the comparisons between engines.

Imports only the standard library, since engines run in different environments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


def qwen2(
    hidden_size: int, intermediate_size: int, layers: int, heads: tuple[int, int], vocab_size: int
) -> dict[str, Any]:
    """Return arguments of a Qwen2Config; `heads` are those of queries, and of keys and values."""
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B's
    "S": qwen2(896, 4864, 24, (14, 2), 151_936),
    # Qwen2.5-7B's
    "L": qwen2(3584, 18_944, 28, (28, 4), 152_064) | {"tie_word_embeddings": False},
    # Between S and T, for float32 on few cores
    "M": qwen2(512, 2048, 8, (8, 2), 32_768),
    # Qwen3.5-0.8B's: a Gated DeltaNet in three of four layers
    "Q": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248_320,
        "tie_word_embeddings": True,
    },
    # The bundled model's size, where overheads are most of a step
    "T": qwen2(128, 512, 4, (4, 2), 4096),
}
"""Shapes of models with random weights in bfloat16."""


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class Workload:
    """Prompts that are all there at the start, or that arrive one by one.

    Attributes:
        prompts: Number of prompts.
        shortest: Tokens of the shortest prompt; lengths are log-uniform up to `longest`.
        longest: Length of the longest.
        common: Tokens that all prompts begin with, besides.
        samples: Completions of each prompt.
        new_tokens: Least and most tokens of a completion.
        temperature: 0 is greedy; otherwise the full vocabulary is sampled, with logprobs.
        rate: Arrivals per second (Poisson); 0 is all at once.
        top_p: Less than 1 restricts the choice.
        uniform: Lengths of prompts are uniform instead.
    """

    prompts: int
    shortest: int
    longest: int
    new_tokens: tuple[int, int]
    common: int = 0
    samples: int = 1
    temperature: float = 0.0
    rate: float = 0.0
    # Not in the seed of requests, which others have without them.
    top_p: float = field(default=1.0, repr=False)
    uniform: bool = field(default=False, repr=False)


WORKLOADS = {
    "W1": Workload(1, 128, 128, (64, 64)),
    "W1-short": Workload(1, 128, 128, (16, 16)),
    "W1-short-4": Workload(4, 128, 128, (16, 16)),
    "W2": Workload(16, 128, 128, (64, 64)),
    "W2-short": Workload(16, 128, 128, (16, 16)),
    "W3": Workload(4, 256, 256, (32, 32), samples=8, temperature=1.0),
    "W4": Workload(64, 32, 512, (16, 128), rate=1.0),
    "W5": Workload(32, 64, 64, (32, 32), common=1024),
}


@dataclass(frozen=True)
class Request:
    """One prompt of a run: its tokens, how many to generate, and when it arrives, in seconds."""

    token_ids: list[int]
    new_tokens: int
    arrival_s: float


def make_requests(workload: Workload, vocab_size: int, seed: int) -> list[Request]:
    """Return the same requests for every engine, and others for every seed, which no cache has."""
    # The workload is part of the seed, so that workloads have no prompts in common.
    rng = random.Random(f"{seed} {workload}")
    first, last = min(300, vocab_size // 4), vocab_size - min(1936, vocab_size // 4)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(first, last) for _ in range(count)]

    common, now = tokens(workload.common), 0.0
    requests = []
    for _ in range(workload.prompts):
        length = round(workload.shortest * (workload.longest / workload.shortest) ** rng.random())
        if workload.uniform:
            length = rng.randint(workload.shortest, workload.longest)
        new_tokens = rng.randint(*workload.new_tokens)
        requests.append(Request(common + tokens(length), new_tokens, now))
        if workload.rate:
            now += rng.expovariate(workload.rate)
    return requests

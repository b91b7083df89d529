"""The workloads and model shapes that engines are compared on. Imports nothing but the standard
library, since each engine runs in an environment of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B's
    "S": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    # Qwen2.5-7B's
    "L": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    # The bundled model's size, where overheads are most of a step
    "T": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
}
"""Settings of a Qwen2Config; the weights are random, and bfloat16."""


@dataclass(frozen=True)
class Workload:
    """Prompts that are all there at the start, or that arrive one by one.

    Attributes:
        prompts: How many.
        shortest: Tokens of the shortest prompt; lengths are log-uniform up to `longest`.
        longest: Of the longest.
        common: Tokens that all prompts begin with, besides.
        samples: Completions of each prompt.
        new_tokens: Least and most tokens of a completion.
        temperature: 0 is greedy; otherwise the full vocabulary is sampled, with logprobs.
        rate: Arrivals per second (Poisson); 0 is all at once.
    """

    prompts: int
    shortest: int
    longest: int
    new_tokens: tuple[int, int]
    common: int = 0
    samples: int = 1
    temperature: float = 0.0
    rate: float = 0.0


WORKLOADS = {
    "W1": Workload(1, 128, 128, (64, 64)),
    "W1-short": Workload(1, 128, 128, (16, 16)),
    "W2": Workload(16, 128, 128, (64, 64)),
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
    """The same for every engine, and others for every seed, so that no cache helps unasked."""
    # Of the workload too: one that begins as another would find that one's prompts cached.
    rng = random.Random(f"{seed} {workload}")
    first, last = min(300, vocab_size // 4), vocab_size - min(1936, vocab_size // 4)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(first, last) for _ in range(count)]

    common, now = tokens(workload.common), 0.0
    requests = []
    for _ in range(workload.prompts):
        length = round(workload.shortest * (workload.longest / workload.shortest) ** rng.random())
        new_tokens = rng.randint(*workload.new_tokens)
        requests.append(Request(common + tokens(length), new_tokens, now))
        if workload.rate:
            now += rng.expovariate(workload.rate)
    return requests

"""The workloads and model shapes of the comparisons between engines.

Imports only the standard library, since engines run in different environments.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cache
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
    # Qwen2.5-0.5B's with an output layer of its own, which makes its text known
    "K": qwen2(896, 4864, 24, (14, 2), 151_936) | {"tie_word_embeddings": False},
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


FIRST_WORD = 300
"""The first token of known texts; those before are special tokens and bytes."""


@cache
def random_successors(size: int, first: int, seed: int) -> list[int]:
    """Return the successor of each token: tokens from `first` on are one random cycle, those before
    are their own successors."""
    circle = list(range(first, size))
    random.Random(seed).shuffle(circle)
    successors = list(range(size))
    for token, following in itertools.pairwise([*circle, circle[0]]):
        successors[token] = following
    return successors


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
        constraint: Form of the texts, one of `KINDS`.
        size: Records of the JSON, dates or words; each has at least one token.
        fresh: Every run has a grammar that no run had before.
        text: Known text of the model K: with "edited" the prompt has it with one token in twenty
            changed, with "new" it has nothing of it.
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
    constraint: str = field(default="", repr=False)
    size: int = field(default=0, repr=False)
    fresh: bool = field(default=False, repr=False)
    text: str = field(default="", repr=False)

    @property
    def whole(self) -> bool:
        """Whether texts under the constraint end before the last of the new tokens."""
        return 0 < self.size < self.new_tokens[1]


KINDS = ("json", "dates", "words", "choice")

WORKLOADS = {
    "W1": Workload(1, 128, 128, (64, 64)),
    "W1-short": Workload(1, 128, 128, (16, 16)),
    "W1-short-4": Workload(4, 128, 128, (16, 16)),
    "W2": Workload(16, 128, 128, (64, 64)),
    "W2-short": Workload(16, 128, 128, (16, 16)),
    "W3": Workload(4, 256, 256, (32, 32), samples=8, temperature=1.0),
    "W4": Workload(64, 32, 512, (16, 128), rate=1.0),
    "W5": Workload(32, 64, 64, (32, 32), common=1024),
    "W6": Workload(1, 4096, 4096, (16, 16)),
    "W7": Workload(4, 2048, 2048, (16, 16)),
    "W8": Workload(64, 64, 64, (16, 16)),
    # Without a constraint, for the ratios; with one, in texts too long to end; the first token
    # by a known grammar and by a new one; and whole texts, for their validity.
    "any": Workload(4, 32, 32, (16, 16)),
    **{kind: Workload(4, 32, 32, (16, 16), constraint=kind, size=30) for kind in KINDS},
    "any-first": Workload(1, 16, 16, (2, 2)),
    **{
        f"{kind}-first{'-new' * fresh}": Workload(
            1, 16, 16, (2, 2), constraint=kind, size=30, fresh=fresh
        )
        for kind in KINDS
        for fresh in (False, True)
    },
    **{f"{kind}-whole": Workload(4, 32, 32, (256, 256), constraint=kind, size=1) for kind in KINDS},
    "edited": Workload(1, 192, 192, (64, 64), text="edited"),
    "edited-4": Workload(4, 192, 192, (64, 64), text="edited"),
    "new": Workload(1, 192, 192, (64, 64), text="new"),
}


@dataclass(frozen=True)
class Request:
    """One prompt of a run.

    Attributes:
        token_ids: Its tokens.
        new_tokens: How many to generate.
        arrival_s: When it arrives, in seconds.
        constraint: See `constraint_of`.
        answer: The tokens that a model of known text generates.
    """

    token_ids: list[int]
    new_tokens: int
    arrival_s: float
    constraint: dict[str, Any] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)


def constraint_of(kind: str, size: int, number: int) -> dict[str, Any]:
    """Return a `json_schema`, `regex` or `choice`; the last two also as `gbnf`, which is all that
    llama.cpp has. Few tokens continue a date, and nearly every one a word. Grammars of different
    numbers differ."""
    if kind == "json":
        record = object_schema(
            {
                "id": {"type": "integer", "minimum": 0, "maximum": 999},
                "kind": {"enum": ["order", "offer", "bill", "note"]},
                "paid": {"type": "boolean"},
                f"name{number}": {"type": "string", "maxLength": 12},
            }
        )
        items = {"items": record, "minItems": size, "maxItems": size}
        return {"json_schema": {"type": "array", **items}}
    if kind == "dates":
        year = 4 + number
        return {
            "regex": f"([0-9]{{{year}}}-[0-9]{{2}}-[0-9]{{2}}, ){{{size}}}",
            "gbnf": f"root ::= date{{{size}}}\n"
            f'date ::= [0-9]{{{year}}} "-" [0-9]{{2}} "-" [0-9]{{2}} ", "',
        }
    if kind == "words":
        longest = 12 + number
        return {
            "regex": f"([a-z]{{2,{longest}}} ){{{size}}}",
            "gbnf": f'root ::= word{{{size}}}\nword ::= [a-z]{{2,{longest}}} " "',
        }
    rng = random.Random(number)
    texts = [
        " ".join("".join(rng.choices("abcdefghij", k=3)) for _ in range(size)) for _ in range(50)
    ]
    return {"choice": texts, "gbnf": "root ::= " + " | ".join(f'"{text}"' for text in texts)}


def masked_texts() -> dict[str, str]:
    """Return the beginning of a text under each constraint of 30 records, dates or words, each byte
    of which is a token."""
    return {
        "json": '[{"id":12,"kind":"order","paid":true,"name0":"abcdefg',
        "dates": "2026-11-29,",
        "words": "abcdefgh",
        "choice": constraint_of("choice", 30, 0)["choice"][0][:3],
    }


def make_requests(workload: Workload, vocab_size: int, seed: int) -> list[Request]:
    """Return the same requests for every engine, and others for every seed, which no cache has."""
    # The workload is part of the seed, so that workloads have no prompts in common.
    further = f"{workload.constraint}{workload.text}{workload.fresh or ''}"
    rng = random.Random(f"{seed} {workload}{further}")
    first, last = min(FIRST_WORD, vocab_size // 4), vocab_size - min(1936, vocab_size // 4)
    constraint = {}
    if workload.constraint:
        number = seed + 1 if workload.fresh else 0
        constraint = constraint_of(workload.constraint, workload.size, number)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(first, last) for _ in range(count)]

    common, now = tokens(workload.common), 0.0
    requests = []
    for _ in range(workload.prompts):
        length = round(workload.shortest * (workload.longest / workload.shortest) ** rng.random())
        if workload.uniform:
            length = rng.randint(workload.shortest, workload.longest)
        new_tokens = rng.randint(*workload.new_tokens)
        prompt, answer = common + tokens(length), []
        if workload.text:
            prompt, answer = known_text(prompt, new_tokens, workload.text, vocab_size, rng)
        requests.append(Request(prompt, new_tokens, now, constraint, answer))
        if workload.rate:
            now += rng.expovariate(workload.rate)
    return requests


CHANGED = 0.05
"""Share of an edited text's tokens that differ in the prompt."""


def known_text(
    filler: list[int], new_tokens: int, kind: str, vocab_size: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Return a prompt of as many tokens as the filler, and the tokens that follow it."""
    successors = random_successors(vocab_size, FIRST_WORD, seed=1)
    text = [rng.choice(filler)]
    while len(text) < 16 + new_tokens:
        text.append(successors[text[-1]])
    context, answer = text[:16], text[16:]
    if kind == "new":
        return filler[: -len(context)] + context, answer
    before = [rng.choice(filler) if rng.random() < CHANGED else token for token in text]
    rest = filler[: len(filler) - len(before) - len(context)]
    middle = len(rest) // 2
    return [*rest[:middle], *before, *rest[middle:], *context], answer

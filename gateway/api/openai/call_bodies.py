"""The bodies of all calls, by the call's name."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...serving.sampling_fields import SamplingBody
from .bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerateBody,
    RerankBody,
    ScoreBody,
    SessionBody,
    TokenizeBody,
)
from .response_bodies import ResponseBody

CallName = Literal[
    "completions",
    "chat",
    "responses",
    "generate",
    "sampling_params",
    "tokenize",
    "detokenize",
    "embeddings",
    "score",
    "rerank",
    "kv_sessions",
]
"""`sampling_params` are a field of `generate`, with fields of its own."""

BODIES: dict[CallName, type[msgspec.Struct]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "responses": ResponseBody,
    "generate": GenerateBody,
    "sampling_params": SamplingBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "embeddings": EmbeddingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
    "kv_sessions": SessionBody,
}

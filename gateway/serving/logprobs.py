"""Tokens with their logprobs, the names of tokens there, and vLLM's form of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

from ...bus.public import TokenLogprob
from .words import Words

Tops = Sequence[TokenLogprob]


class Scored(NamedTuple):
    """A token at its place; the first token of a prompt has no logprob."""

    token_id: int
    logprob: float | None
    top: Tops


def scored(
    token_ids: Sequence[int], logprobs: Sequence[float | None], top_logprobs: Sequence[Tops] | None
) -> list[Scored]:
    """Zip tokens with their logprobs and alternatives, `[k]` each; None for no alternatives."""
    tops = top_logprobs if top_logprobs is not None else ((),) * len(token_ids)
    return list(starmap(Scored, zip(token_ids, logprobs, tops, strict=True)))


class TokenNames:
    """The names of tokens in logprobs: their texts, or their ids."""

    def __init__(self, words: Words, *, as_ids: bool) -> None:
        self._words = words
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        return self._words.token_bytes(token_id)


def logprobs_by_id(tokens: Sequence[Scored], names: TokenNames) -> list[dict[str, Any] | None]:
    """Return vLLM's form: by token id, the token and the likeliest ones, with known ranks."""

    def at(token: Scored) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        ranked: list[tuple[int, float, int | None]] = [
            (top.token_id, top.logprob, rank) for rank, top in enumerate(token.top, 1)
        ]
        if all(token_id != token.token_id for token_id, _, _ in ranked):
            ranked.insert(0, (token.token_id, token.logprob, None))
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": names.name(token_id)}
            for token_id, logprob, rank in ranked
        }

    return list(map(at, tokens))

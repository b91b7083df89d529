"""Logprobs in OpenAI's two shapes, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

from ...bus.public import TokenLogprob
from ..words import Words

Tops = Sequence[TokenLogprob]


class Scored(NamedTuple):
    """A token at its place; the first of a prompt has no logprob."""

    token_id: int
    logprob: float | None
    top: Tops


def scored(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[Tops] | None,
) -> list[Scored]:
    """Tokens with what is known of each: `[k]` of all three, or no likeliest tokens at all."""
    tops = top_logprobs if top_logprobs is not None else ((),) * len(token_ids)
    return list(starmap(Scored, zip(token_ids, logprobs, tops, strict=True)))


class TokenNames:
    """What logprobs call a token: its text, or its id."""

    def __init__(self, words: Words, *, as_ids: bool) -> None:
        self._words = words
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        return self._words.token_bytes(token_id)


class CompletionLogprobs:
    """`logprobs` of the choices of `/v1/completions`, for a text that grows."""

    def __init__(self, words: Words, names: TokenNames) -> None:
        self._names = names
        self._detokenizer = words.detokenizer(skip_special=True)
        self._offset = 0

    def add(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Those of the next tokens.

        `text_offset` tells where a token's text begins in the text of all tokens, of which a stop
        cuts off the end.
        """
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            found["tokens"].append(self._names.name(token.token_id))
            found["token_logprobs"].append(token.logprob)
            found["top_logprobs"].append(self._tops(token))
            found["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push([token.token_id]))
        return found

    def _tops(self, token: Scored) -> dict[str, float] | None:
        """The likeliest tokens and the token itself. Of two with one text the likelier counts."""
        if token.logprob is None:
            return None
        tops: dict[str, float] = {}
        for top in token.top:
            tops.setdefault(self._names.name(top.token_id), top.logprob)
        tops.setdefault(self._names.name(token.token_id), token.logprob)
        return tops


def chat_logprobs(tokens: Sequence[Scored], names: TokenNames) -> dict[str, Any]:
    """`logprobs` of the choices of `/v1/chat/completions`."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        bytes_ = list(names.bytes(token_id))
        return {"token": names.name(token_id), "logprob": logprob, "bytes": bytes_}

    content = [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    """`logprobs` of the choices of `/inference/v1/generate`: as a chat's, with ids for texts."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}

    content = [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in token.top]}
        for token in tokens
    ]
    return {"content": content}


def prompt_logprobs(tokens: Sequence[Scored], names: TokenNames) -> list[dict[str, Any] | None]:
    """As vLLM's: by token id, the token itself and the likeliest, with their ranks as far known."""

    def at(token: Scored) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        ranked: list[tuple[int, float, int | None]] = [
            (top.token_id, top.logprob, rank) for rank, top in enumerate(token.top, 1)
        ]
        if all(token_id != token.token_id for token_id, _, _ in ranked):
            ranked.insert(0, (token.token_id, token.logprob, None))
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": names.name(token_id),
            }
            for token_id, logprob, rank in ranked
        }

    return list(map(at, tokens))

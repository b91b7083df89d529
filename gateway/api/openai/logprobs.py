"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...serving.logprobs import Scored, TokenNames
from ...serving.words import Words


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

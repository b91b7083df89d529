"""Tokens with their logprobs, in the forms of OpenAI and vLLM."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from .message_parts import TokenRecord
from .tokenizer import Tokenizer


def restricted(logprob: float, support: float) -> float:
    """Return the logprob within a support, float32 as both are."""
    (found,) = struct.unpack("f", struct.pack("f", logprob - support))
    return float(found)


class TokenNames:
    """The names of tokens in logprobs: their texts, or their ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)


def logprobs_by_id(tokens: Sequence[TokenRecord], names: TokenNames) -> list[dict[str, Any] | None]:
    """Return vLLM's form: by token id, the token and the likeliest ones, with known ranks."""

    def at(token: TokenRecord) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        ranked: list[tuple[int, float, int | None]] = [
            (top.token_id, top.logprob, rank) for rank, top in enumerate(token.top, 1)
        ]
        if all(token_id != token.token_id for token_id, _, _ in ranked):
            ranked.insert(0, (token.token_id, token.logprob, token.rank))
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": names.name(token_id)}
            for token_id, logprob, rank in ranked
        }

    return list(map(at, tokens))


class TextLogprobs:
    """`logprobs` of a choice of `/v1/completions`, for a text that grows."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._detokenizer = names.tokenizer.detokenizer(skip_special=True)
        self._offset = 0

    def add(self, tokens: Sequence[TokenRecord]) -> dict[str, Any]:
        """Return the logprobs of the next tokens.

        `text_offset` is the place of a token's text in the text of all tokens. A stop string cuts
        off the end of that.
        """
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token.token_id]))
        written: dict[str, Any] = {
            "tokens": [self._names.name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._tops(token) for token in tokens],
            "text_offset": offsets,
        }
        if any(token.support is not None for token in tokens):
            written["support_logprobs"] = [token.support for token in tokens]
        return written

    def _tops(self, token: TokenRecord) -> dict[str, float] | None:
        """Return the likeliest tokens and the token itself. Of two with one text the likelier
        counts."""
        if token.logprob is None:
            return None
        tops: dict[str, float] = {}
        for top in token.top:
            tops.setdefault(self._names.name(top.token_id), top.logprob)
        tops.setdefault(self._names.name(token.token_id), token.logprob)
        return tops


def token_entries(tokens: Sequence[TokenRecord], names: TokenNames | None) -> list[dict[str, Any]]:
    """Return an entry for each token, as chats and responses have them.

    Args:
        names: None names tokens by their ids, as `/inference/v1/generate` does.
    """

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        if names is None:
            named = {"token": f"token_id:{token_id}", "token_id": token_id}
            return named | {"logprob": logprob, "bytes": None}
        bytes_ = list(names.bytes(token_id))
        return {"token": names.name(token_id), "logprob": logprob, "bytes": bytes_}

    return [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in token.top]}
        | ({} if token.support is None else {"support_logprob": token.support})
        for token in tokens
    ]

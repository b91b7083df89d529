"""A sample of a stream while it grows, and when the next event of it is due.

SGLang's events repeat all that came before, so an event at each token would cost the square of the
answer's length.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ....bus.public import CompletionChunk

if TYPE_CHECKING:
    from .answers import Answer, Answers

EVERY_TOKEN_BYTES = 8192
"""Events come at every token until they have so many bytes."""

GROWTH = 16
"""From then on when there are a sixteenth more tokens, so that all events of a sample together have
at most about 17 times the bytes of the last."""


class Growing:
    """What has come of a sample. Everything is appended; only an event looks at all of it."""

    def __init__(self, writer: Answers, sample_index: int) -> None:
        self._writer = writer
        self._index = sample_index
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._top_logprobs: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        self._free: int | None = None
        wanted, words = writer.wanted, writer.words
        self._detokenizer = None
        if words is not None and not wanted.plain_text:
            self._detokenizer = words.detokenizer(skip_special=wanted.skip_special)
        self._shown = 0
        self._due_at = 1

    @property
    def due(self) -> bool:
        """Whether it is time for an event."""
        return len(self._token_ids) >= self._due_at

    def add(self, chunk: CompletionChunk) -> None:
        """Takes the next tokens."""
        version = chunk.weight_version
        if chunk.token_ids and (not self._spans or self._spans[-1][0] != version):
            self._spans.append((version, len(self._token_ids)))
        self._token_ids += chunk.token_ids
        if self._detokenizer is None:
            self._texts.append(chunk.text)
        else:
            self._texts.append(self._detokenizer.push(chunk.token_ids))
        writer, wanted = self._writer, self._writer.wanted
        if wanted.logprobs:
            self._logprobs += writer.entries(chunk.token_ids, chunk.logprobs)
            if wanted.top_logprobs:
                self._top_logprobs += map(writer.top_entries, chunk.top_logprobs or ())

    def answer(self) -> Answer:
        """All that there is, as an event has it."""
        writer, wanted = self._writer, self._writer.wanted
        self._shown = len(self._token_ids)
        meta = writer.meta(self._index, self._shown, self._spans)
        if wanted.logprobs:
            meta["output_token_logprobs"] = self._logprobs
            if wanted.top_logprobs:
                meta["output_top_logprobs"] = self._top_logprobs
        meta["finish_reason"] = None
        return {"text": self._text(), "output_ids": self._token_ids, "meta_info": meta}

    def sent(self, size_bytes: int) -> None:
        """The answer became an event of so many bytes."""
        rarer = math.ceil(self._shown / GROWTH) if size_bytes > EVERY_TOKEN_BYTES else 1
        self._due_at = self._shown + max(rarer, self._writer.wanted.interval_tokens)

    def _text(self) -> str:
        self._texts = ["".join(self._texts)]
        text = self._texts[0]
        if self._detokenizer is None or not self._writer.wanted.trim_stop:
            return text
        min_tokens = self._writer.wanted.request.sampling.min_tokens
        if len(self._token_ids) <= min_tokens:
            return text
        if self._free is None:
            self._free = self._writer.free_of_stops(self._token_ids)
        return self._writer.without_stop(text, self._free, ended=False)

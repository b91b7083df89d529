"""Deduplication of a sample's chunks after a server restart."""

from __future__ import annotations

from array import array

import msgspec

from ..public import CompletionChunk, token_columns

_WITHIN = -1


class Given:
    """Chunks of one sample, in order, each returned once.

    A server restarted with old data receives some chunks again: the same tokens with the same text,
    but possibly cut at other places where drafted tokens were accepted.
    """

    __slots__ = ("_chars",)

    def __init__(self) -> None:
        # Text length after each number of tokens; `_WITHIN` where no chunk has ended so far.
        self._chars = array("q", (0,))

    def next_of(self, chunk: CompletionChunk) -> CompletionChunk | None:
        """Return the part of a chunk that continues the sample, and record it as returned.

        Returns None if all of it was returned before, or if tokens before it are missing: a server
        restarted without its last entries may receive one more before the stream is rewritten.
        """
        given, offset, size = len(self._chars) - 1, chunk.token_offset, len(chunk.token_ids)
        if offset == given:
            self._add(size, self._chars[-1] + len(chunk.text))
            return chunk
        before = self._chars[offset] if offset < given else _WITHIN
        if before == _WITHIN:
            return None
        length = before + len(chunk.text)
        if offset + size <= given:
            # The same text cut elsewhere: the next loss may begin at this cut.
            if self._chars[offset + size] == _WITHIN:
                self._chars[offset + size] = length
            return None
        old, shown = given - offset, self._chars[-1] - before
        self._add(size - old, length)
        tops = chunk.top_logprobs
        return msgspec.structs.replace(
            chunk,
            token_offset=given,
            token_ids=chunk.token_ids[old:],
            logprobs=chunk.logprobs[old:],
            text=chunk.text[shown:],
            top_logprobs=None if tops is None else tops[old:],
            # Prompt logprobs came with the first chunk.
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            **token_columns(chunk, old),
        )

    def _add(self, tokens: int, length: int) -> None:
        if tokens:
            self._chars.extend((_WITHIN,) * (tokens - 1))
            self._chars.append(length)
        else:
            self._chars[-1] = length

"""What a reader was given of a sample, so that what comes again is given once."""

from __future__ import annotations

from array import array

import msgspec

from ..public import CompletionChunk

_WITHIN = -1


class Given:
    """The chunks of one sample, in order.

    A server restarted with old data gets some of them again: the same tokens, and with each the
    same text, but where drafted tokens were accepted perhaps cut into other chunks.
    """

    __slots__ = ("_chars",)

    def __init__(self) -> None:
        # How long the text is with so many tokens; `_WITHIN` where no chunk has ended so far.
        self._chars = array("q", (0,))

    def next_of(self, chunk: CompletionChunk) -> CompletionChunk | None:
        """What of a chunk continues what was given out; that counts as given now.

        None when all of it was given out already, or tokens are missing before it: a server
        restarted without its last entries may get one more before the stream is written anew.
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
            # The same text, cut in another place: what is lost next may begin there.
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
            # They came with the first chunk.
            prompt_logprobs=None,
            prompt_top_logprobs=None,
        )

    def _add(self, tokens: int, length: int) -> None:
        if tokens:
            self._chars.extend((_WITHIN,) * (tokens - 1))
            self._chars.append(length)
        else:
            self._chars[-1] = length

"""Outputs of many sequences, found again by the tokens in front of a place, in bounded memory.

The outputs lie one behind the other in a ring. For each kind of context a table has the newest
place that follows the same tokens, by their hash. Nothing is looked for in order to forget it: what
is written over has other hashes, which whoever finds the place compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...runner.interface import IntArray

Words = npt.NDArray[np.uint64]

LEAD = 16
"""Tokens before a place that may tell it from others."""

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ContextKind:
    """By what places are found.

    Attributes:
        length: So many tokens before them, at most `LEAD`.
        same_prompt: Whether they have to be of the same prompt.
        likelihood: How likely a place's tokens are found to come again.
    """

    length: int
    same_prompt: bool
    likelihood: float


CONTEXTS = (
    ContextKind(8, True, 0.97),
    ContextKind(16, False, 0.9),
    ContextKind(3, True, 0.8),
    ContextKind(6, False, 0.6),
    ContextKind(2, False, 0.4),
)
"""The ones that tell most come first, and are taken before the others."""

_SMALLEST = 128

_END = -2
"""Behind the tokens of each piece."""

# Odd numbers of which all bits look alike.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_POWERS: Words = np.multiply.accumulate(np.full(LEAD, _BASE))

_LAST = np.array([kind.length - 1 for kind in CONTEXTS])
_SAME_PROMPT = np.array([kind.same_prompt for kind in CONTEXTS])
_NUMBERS: Words = np.arange(len(CONTEXTS), dtype=np.uint64)[:, None] << np.uint64(32)
_KINDS = np.arange(len(CONTEXTS))[:, None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an output that is to be found.

    Attributes:
        tokens: Those that can be found, and some behind them with which places go on.
        count: How many of them can be found.
        before: `[LEAD]`, those in front, with `NO_TOKEN` where there are none.
        scope: Only who has the same finds it.
        prompt: Stands for its prompt.
    """

    tokens: IntArray
    count: int
    before: IntArray
    scope: int
    prompt: int


class TokenIndex:
    """An index of at most so many tokens; one takes 4 bytes, and 8 to 12 for each kind of context.

    Attributes:
        num_tokens: How many are kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self._size = max(max_tokens, _SMALLEST)
        bits = (self._size - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        # Zeros are no memory yet: it is taken page by page as it is written.
        self._tokens = np.zeros(self._size, np.int32)
        # Place plus one; 0 for none.
        self._newest = np.zeros((len(CONTEXTS), 1 << bits), np.int32)
        self._tags = np.zeros((len(CONTEXTS), self._size), np.uint32)
        self._next = 0
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, once all of it has been written."""
        return self._tokens.nbytes + self._newest.nbytes + self._tags.nbytes

    def add(self, pieces: Sequence[Piece]) -> None:
        """Writes pieces down; of one that does not fit, its last tokens."""
        texts, places, scopes, prompts = [], [], [], []
        for piece in pieces:
            tokens, count = piece.tokens, piece.count
            if len(tokens) >= self._size:
                raise ValueError(f"{len(tokens)} tokens of a piece, and there is room for less")
            places.append(self._write(tokens) + np.arange(count))
            text = np.concatenate((piece.before, tokens[: count - 1]))
            texts.append(np.lib.stride_tricks.sliding_window_view(text, LEAD))
            scopes.append(np.full(count, piece.scope, np.uint64))
            prompts.append(np.full(count, piece.prompt, np.uint64))
        where = np.concatenate(places)
        keys = self._keys(np.concatenate(texts), np.concatenate(scopes), np.concatenate(prompts))
        for kind, key in enumerate(keys):
            # Of places with the same context the last one stays.
            self._newest[kind, key >> self._shift] = where + 1
            self._tags[kind, where] = key

    def find(self, before: IntArray, scopes: Words, prompts: Words) -> tuple[IntArray, IntArray]:
        """The newest places behind the tokens that tell most.

        Args:
            before: `[sequences, LEAD]`, last tokens, with `NO_TOKEN` where there are fewer.
            scopes: `[sequences]`.
            prompts: `[sequences]`.

        Returns:
            The place for each sequence, -1 where there is none, and of which of `CONTEXTS`.
        """
        keys = self._keys(before, scopes, prompts)
        buckets = (keys >> self._shift).astype(np.int64) + _KINDS * self._newest.shape[1]
        found = self._newest.take(buckets).astype(np.int64) - 1
        tags = self._tags.take(found + _KINDS * self._size, mode="clip")
        places = np.where(tags == keys.astype(np.uint32), found, -1)
        best = (places >= 0).argmax(axis=0)
        return places[best, np.arange(len(best))], best

    def read(self, place: int, limit: int) -> list[int]:
        """What stands from a place on, up to the end of its piece."""
        tokens: list[int] = self._tokens[place : place + limit].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens

    def _write(self, tokens: IntArray) -> int:
        """Puts tokens into the ring, over the oldest, and says where."""
        stop = self._next + len(tokens) + 1
        if stop > self._size:
            self._tags[:, self._next :] = 0
            self._next, stop = 0, len(tokens) + 1
        start, self._next = self._next, stop
        self._tokens[start : stop - 1] = tokens
        self._tokens[stop - 1] = _END
        self._tags[:, start:stop] = 0
        self.num_tokens = max(self.num_tokens, stop)
        return start

    @staticmethod
    def _keys(before: IntArray, scopes: Words, prompts: Words) -> Words:
        """Hashes of contexts, `[kinds, places]`, whose high bits choose a bucket."""
        products = (before[:, ::-1] + 2).astype(np.uint64) * _POWERS
        # Of the last token, the last two, and so on.
        sums = np.cumsum(products, axis=1, dtype=np.uint64)
        keys: Words = sums.T[_LAST]
        keys ^= scopes
        keys[_SAME_PROMPT] ^= prompts
        keys ^= _NUMBERS
        keys *= _MIX
        keys ^= keys >> np.uint64(32)
        keys *= _MIX
        return keys

"""Outputs of many sequences, found again by the tokens in front of a place, in bounded memory.

The outputs lie one behind the other in a ring. For each kind of context a table has the newest
place that follows the same tokens, by their hash. Nothing is looked for in order to forget it: what
is written over has other hashes, which whoever finds the place compares.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .....bus.messages import CacheScope
from ...runner.interface import IntArray
from ..sequences import SequenceTable
from .drafts import NO_DRAFT, Draft, DraftContext

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


_PIECE = 32
"""A sample that goes on is written down in pieces of so many tokens."""

_BEHIND = 16
"""So many tokens behind a place that is found lie in the same piece, unless the sample ends."""

_MOST_LEFT = 256


@dataclass(slots=True)
class _Followed:
    """A sequence.

    Attributes:
        seq_id: Whose row it is.
        scope: Stands for who may learn from it.
        prompt: Stands for its prompt.
        num_written: How many of its tokens can be found, or are not to be.
    """

    seq_id: int
    scope: int
    prompt: int
    num_written: int


class SuffixSource:
    """Goes on as outputs of the same scope went on, the newest that had the same tokens before.

    Outputs of the same prompt come first, and of these what follows the same last 8 tokens; then
    whatever follows the same 16, and so on (`CONTEXTS`). So a sample goes on as its siblings and
    earlier samples of its prompt did, also behind a place where it has said something of its own.
    Prompts themselves are not remembered. Outputs can be found when they have ended, and long ones
    some tokens after they have been made.

    After suffix decoding (Oliaro et al., SuffixDecoding, arXiv 2411.04975); in place of suffix
    trees there are some lengths of contexts.
    """

    name: ClassVar[str] = "suffix"

    def __init__(self, table: SequenceTable, max_tokens: int) -> None:
        """`max_tokens`: most tokens of outputs that are remembered."""
        self._table = table
        self._index = TokenIndex(max_tokens)
        self._most = max(1, max_tokens // 2 - _BEHIND)
        # By row.
        self._followed: dict[int, _Followed] = {}
        self._ended: list[Piece] = []
        # Of sequences that have left, so that what a preempted one has said is not written twice.
        self._left: OrderedDict[int, _Followed] = OrderedDict()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(contexts)
        followed = [self._follow(context) for context in contexts]
        if self._ended:
            self._index.add(self._ended)
            self._ended.clear()
        if not self._index.num_tokens or not contexts:
            return drafts
        rows = np.array([context.row for context in contexts])
        ends = np.array([len(context.tokens) for context in contexts])
        before = self._before(rows, ends)
        scopes = np.array([each.scope for each in followed], np.uint64)
        prompts = np.array([each.prompt for each in followed], np.uint64)
        places, kinds = self._index.find(before, scopes, prompts)
        for number in np.flatnonzero(places >= 0).tolist():
            tokens = self._index.read(int(places[number]), contexts[number].limit)
            if tokens:
                likelihoods = (CONTEXTS[kinds[number]].likelihood,)
                drafts[number] = Draft(tuple(tokens), likelihoods, self.name)
        return drafts

    def forget(self, row: int, seq_id: int) -> None:
        table = self._table
        known = int(table.num_known[row])
        tokens = table.tokens[row, :known]
        followed = self._of(row, seq_id, tokens, known - int(table.num_generated[row]))
        # Tokens that nobody has read belong to no output.
        unread = np.flatnonzero(tokens[followed.num_written :] < 0)
        end = followed.num_written + int(unread[0]) if unread.size else known
        if end > followed.num_written:
            self._write(followed, row, end, end)
        del self._followed[row]
        self._left[seq_id] = followed
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)

    def clear(self) -> None:
        self._followed.clear()
        # After that sequence ids may begin anew.
        self._left.clear()

    def _follow(self, context: DraftContext) -> _Followed:
        """What is known of a sequence; what it has said long ago is written down."""
        followed = self._followed.get(context.row)
        if followed is None or followed.seq_id != context.seq_id:
            followed = self._of(context.row, context.seq_id, context.tokens, context.num_prompt)
        known = len(context.tokens)
        if known - followed.num_written >= _PIECE + _BEHIND:
            self._write(followed, context.row, known - _BEHIND, known)
        return followed

    def _of(self, row: int, seq_id: int, tokens: IntArray, num_prompt: int) -> _Followed:
        followed = self._followed.get(row)
        if followed is not None and followed.seq_id == seq_id:
            return followed
        followed = self._left.pop(seq_id, None)
        if followed is None:
            scope = scope_number(self._table.scope[row])
            prompt = _digest(tokens[:num_prompt].tobytes())
            followed = _Followed(seq_id, scope, prompt, num_prompt)
        self._followed[row] = followed
        return followed

    def _write(self, followed: _Followed, row: int, stop: int, end: int) -> None:
        """Has the tokens from the last written one up to `stop` found, with those up to `end`."""
        start = max(followed.num_written, stop - self._most)
        (before,) = self._before(np.array([row]), np.array([start]))
        tokens = self._table.tokens[row, start : min(end, stop + _BEHIND)].copy()
        piece = Piece(tokens, stop - start, before, followed.scope, followed.prompt)
        self._ended.append(piece)
        followed.num_written = stop

    def _before(self, rows: IntArray, ends: IntArray) -> IntArray:
        """The last tokens before some places, `[rows, LEAD]`."""
        places = ends[:, None] + np.arange(-LEAD, 0)
        tokens: IntArray = self._table.tokens[rows[:, None], np.maximum(places, 0)]
        tokens[places < 0] = NO_TOKEN
        return tokens


@lru_cache(256)
def scope_number(scope: CacheScope) -> int:
    """Return a 64-bit digest of a scope."""
    return _digest(repr(tuple(scope)).encode())  # `repr` escapes lone surrogates


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

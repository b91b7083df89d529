"""Suffix drafts: outputs of many sequences, indexed by the tokens before each place.

The outputs lie in a ring. For each kind of context, a table maps the hash of the tokens before a
place to the newest such place. Nothing is deleted: an overwritten place has another hash, which a
lookup compares.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from .....bus.messages import CacheScope
from ...runner.interface import IntArray
from ..sequences import SequenceTable
from .drafts import NO_DRAFT, Draft, DraftContext, DraftSource

Words = npt.NDArray[np.uint64]

LEAD = 16
"""Tokens before a place that its contexts use at most."""

NO_TOKEN = -1


class ContextKind(msgspec.Struct, frozen=True):
    """A kind of context by which places are found.

    Attributes:
        length: Tokens before the place, at most `LEAD`.
        same_prompt: Whether the prompt must be the same.
        likelihood: Of the tokens behind the place.
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
"""The most telling kinds first; the first match wins."""

_SMALLEST = 128

_END = -2
"""Marks the end of each segment."""

# Odd numbers with evenly spread bits.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_POWERS: Words = np.multiply.accumulate(np.full(LEAD, _BASE))

_LAST = np.array([kind.length - 1 for kind in CONTEXTS])
_SAME_PROMPT = np.array([kind.same_prompt for kind in CONTEXTS])
_NUMBERS: Words = np.arange(len(CONTEXTS), dtype=np.uint64)[:, None] << np.uint64(32)
_KINDS = np.arange(len(CONTEXTS))[:, None]


class Segment(msgspec.Struct, frozen=True):
    """A segment of an output to index.

    Attributes:
        tokens: The indexed tokens, and some behind them to continue drafts.
        count: How many are indexed.
        before: `[LEAD]`, the tokens in front, `NO_TOKEN` where there are none.
        scope: Only sequences of the same scope find it.
        prompt: Hash of its prompt.
    """

    tokens: IntArray
    count: int
    before: IntArray
    scope: int
    prompt: int


class TokenIndex:
    """An index of tokens in bounded memory: 4 bytes each, and 8 to 12 for each kind of context.

    Attributes:
        num_tokens: Tokens in the index.
    """

    def __init__(self, max_tokens: int) -> None:
        self._size = max(max_tokens, _SMALLEST)
        bits = (self._size - 1).bit_length()
        self._shift = np.uint64(64 - bits)
        # Pages of zeros take memory only when they are written.
        self._tokens = np.zeros(self._size, np.int32)
        # Place plus one; 0 for none.
        self._newest = np.zeros((len(CONTEXTS), 1 << bits), np.int32)
        self._tags = np.zeros((len(CONTEXTS), self._size), np.uint32)
        self._next = 0
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays once all pages are written."""
        return self._tokens.nbytes + self._newest.nbytes + self._tags.nbytes

    def add(self, pieces: Sequence[Segment]) -> None:
        """Index segments."""
        texts, places, scopes, prompts = [], [], [], []
        for piece in pieces:
            tokens, count = piece.tokens, piece.count
            if len(tokens) >= self._size:
                raise ValueError(f"{len(tokens)} tokens of a segment, and there is room for less")
            places.append(self._write(tokens) + np.arange(count))
            text = np.concatenate((piece.before, tokens[: count - 1]))
            texts.append(np.lib.stride_tricks.sliding_window_view(text, LEAD))
            scopes.append(np.full(count, piece.scope, np.uint64))
            prompts.append(np.full(count, piece.prompt, np.uint64))
        where = np.concatenate(places)
        keys = self._keys(np.concatenate(texts), np.concatenate(scopes), np.concatenate(prompts))
        for kind, key in enumerate(keys):
            # The newest place wins.
            self._newest[kind, key >> self._shift] = where + 1
            self._tags[kind, where] = key

    def find(self, before: IntArray, scopes: Words, prompts: Words) -> tuple[IntArray, IntArray]:
        """Find the newest place of the most telling context that matches.

        Args:
            before: `[sequences, LEAD]`, last tokens, `NO_TOKEN` where there are fewer.
            scopes: `[sequences]`.
            prompts: `[sequences]`.

        Returns:
            The place for each sequence, -1 for none, and the index in `CONTEXTS`.
        """
        keys = self._keys(before, scopes, prompts)
        buckets = (keys >> self._shift).astype(np.int64) + _KINDS * self._newest.shape[1]
        found = self._newest.take(buckets).astype(np.int64) - 1
        tags = self._tags.take(found + _KINDS * self._size, mode="clip")
        places = np.where(tags == keys.astype(np.uint32), found, -1)
        best = (places >= 0).argmax(axis=0)
        return places[best, np.arange(len(best))], best

    def read(self, place: int, limit: int) -> list[int]:
        """Return the tokens from a place to the end of its segment."""
        tokens: list[int] = self._tokens[place : place + limit].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens

    def _write(self, tokens: IntArray) -> int:
        """Write tokens over the oldest ones of the ring; return the place."""
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
        """Return hashes of contexts, `[kinds, places]`; the high bits choose a bucket."""
        products = (before[:, ::-1] + 2).astype(np.uint64) * _POWERS
        # Column n: of the last n + 1 tokens.
        sums = np.cumsum(products, axis=1, dtype=np.uint64)
        keys: Words = sums.T[_LAST]
        keys ^= scopes
        keys[_SAME_PROMPT] ^= prompts
        keys ^= _NUMBERS
        keys *= _MIX
        keys ^= keys >> np.uint64(32)
        keys *= _MIX
        return keys


_SEGMENT = 32
"""Tokens of a segment of a running output."""

_BEHIND = 16
"""Tokens behind a found place in the same segment, unless the output ends."""

_MOST_LEFT = 256


@dataclass(slots=True)
class _Followed:
    """A tracked sequence.

    Attributes:
        seq_id: Its id.
        scope: Hash of its scope.
        prompt: Hash of its prompt.
        num_written: Tokens that are indexed, or are not to be.
    """

    seq_id: int
    scope: int
    prompt: int
    num_written: int


class SuffixSource(DraftSource):
    """Continues as the newest output of the same scope with the same tokens before.

    Outputs of the same prompt that match the last 8 tokens come first, then any that match 16, and
    so on (`CONTEXTS`). So a sample follows its siblings and earlier samples of its prompt, and
    finds them again after it has diverged. Prompts are not indexed. An output is indexed when it
    ends, a long one in segments.

    After suffix decoding (Oliaro et al., SuffixDecoding, arXiv 2411.04975), with a few context
    lengths in place of suffix trees.
    """

    name: ClassVar[str] = "suffix"

    def __init__(self, table: SequenceTable, max_tokens: int) -> None:
        """`max_tokens`: the size of the index."""
        self._table = table
        self._index = TokenIndex(max_tokens)
        self._most = max(1, max_tokens // 2 - _BEHIND)
        # By row.
        self._followed: dict[int, _Followed] = {}
        self._ended: list[Segment] = []
        # Sequences that left, so that a preempted output is not indexed twice.
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
        # Unread tokens are not part of the output.
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
        # Sequence ids may be used again.
        self._left.clear()

    def _follow(self, context: DraftContext) -> _Followed:
        """Return a sequence's entry; index its older tokens."""
        followed = self._of(context.row, context.seq_id, context.tokens, context.num_prompt)
        known = len(context.tokens)
        if known - followed.num_written >= _SEGMENT + _BEHIND:
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
        """Index the tokens up to `stop`; those up to `end` continue them."""
        start = max(followed.num_written, stop - self._most)
        (before,) = self._before(np.array([row]), np.array([start]))
        tokens = self._table.tokens[row, start : min(end, stop + _BEHIND)].copy()
        piece = Segment(tokens, stop - start, before, followed.scope, followed.prompt)
        self._ended.append(piece)
        followed.num_written = stop

    def _before(self, rows: IntArray, ends: IntArray) -> IntArray:
        """Return the last tokens before some places, `[rows, LEAD]`."""
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

"""Drafts from what has been generated before, by whichever sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np

from .....bus.messages import CacheScope
from ...runner.interface import IntArray
from ..sequences import SequenceTable
from .drafts import NO_DRAFT, Draft, DraftContext
from .token_index import CONTEXTS, LEAD, NO_TOKEN, Piece, TokenIndex

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

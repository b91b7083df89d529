"""Drafts from the sequence's own earlier tokens."""

from __future__ import annotations

from typing import ClassVar

from .drafts import DraftContext
from .lookup import LookupSource
from .token_index import TokenIndex, Writer

_ORDERS = (16, 8, 4, 2)
_MAX_TOKENS = 1 << 20


class NgramSource(LookupSource):
    """Goes on as a sequence, its prompt included, went on behind the same 2 to 16 tokens.

    The tokens of all sequences share one index of a fixed size, in which each finds only its own;
    of those that do not fit the oldest are not found.
    """

    name: ClassVar[str] = "ngram"

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        super().__init__(TokenIndex(max_tokens, _ORDERS))
        self._num_begun = 0

    def _begin(self, context: DraftContext) -> tuple[Writer, int]:
        self._num_begun += 1
        return self._index.writer(self._num_begun, context.tokens[:0]), 0

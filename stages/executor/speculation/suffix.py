"""Drafts from what has been generated before, by whichever sample."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from .drafts import DraftContext
from .lookup import LookupSource
from .token_index import WHOLE, TokenIndex, Writer, scope_number

_ORDERS = (WHOLE, 16, 8, 4, 2)
_MOST_LEFT = 256


class SuffixSource(LookupSource):
    """Goes on as outputs of the same scope went on: those before, and those that are under way.

    The longest context is all of a sample's prompt and output, so where a sample of the same prompt
    said the same so far, then or now, it is followed; and else whoever said the same last 2 to 16
    tokens. Prompts themselves are not remembered.

    The draft is chosen as suffix decoding does (Oliaro et al., SuffixDecoding, arXiv 2411.04975):
    by what most often came next, for as long as that is likely, and for longer the longer the
    context is. In place of suffix trees there are some lengths of contexts.
    """

    name: ClassVar[str] = "suffix"

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: most tokens of outputs that are remembered."""
        super().__init__(TokenIndex(max_tokens, _ORDERS))
        # Of sequences that have left, so that one that was preempted is not written twice.
        self._left: OrderedDict[int, tuple[Writer, int]] = OrderedDict()

    def forget(self, row: int, seq_id: int) -> None:
        followed = self._followed.pop(seq_id, None)
        if followed is not None:
            self._left[seq_id] = followed.writer, followed.num_tokens
            if len(self._left) > _MOST_LEFT:
                self._left.popitem(last=False)

    def clear(self) -> None:
        super().clear()
        # After that sequence ids may begin anew.
        self._left.clear()

    def _begin(self, context: DraftContext) -> tuple[Writer, int]:
        left = self._left.pop(context.seq_id, None)
        if left is not None and left[1] <= len(context.tokens):
            return left
        # The prompt's last token is written with the output, which is what follows it.
        start = max(context.num_prompt - 1, 0)
        scope = scope_number(context.scope)
        return self._index.writer(scope, context.tokens[:start]), start

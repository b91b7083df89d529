"""What became of drafts: since it was last told, and of the last ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from ...bus.messages import VerifiedDraft

_LAST = 1000
"""Drafts that `load` tells of."""


class SourceCounts(NamedTuple):
    """Of one source.

    Attributes:
        drafts: How many drafts were verified.
        draft_tokens: The tokens of these.
        accepted: Those of them that were what was sampled.
        accepted_at: `[positions]`, the same by their place in the draft.
    """

    source: str
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_at: tuple[int, ...]


class DraftCounts:
    """Counts drafts as results tell of them; a draft costs one addition to a table."""

    def __init__(self, sources: Iterable[str]) -> None:
        """`sources`: of which there may be drafts."""
        self._sources = tuple(sources)
        # By source, how often so many tokens were drafted and so many of these accepted.
        self._new: dict[str, Counter[tuple[int, int]]] = self._nothing()
        self._last: deque[tuple[int, int]] = deque(maxlen=_LAST)

    def add(self, drafts: Iterable[VerifiedDraft]) -> None:
        """Drafts were verified."""
        for draft in drafts:
            became = draft.num_tokens, draft.num_accepted
            self._new.setdefault(draft.source, Counter())[became] += 1
            self._last.append(became)

    def take(self) -> list[SourceCounts]:
        """Of each source what has come since this was last asked, also where that is nothing."""
        new, self._new = self._new, self._nothing()
        return [_counts_of(source, found) for source, found in new.items()]

    def load(self) -> dict[str, int]:
        """Of the last thousand drafts: how many there were, their tokens, and those accepted."""
        return {
            "drafts": len(self._last),
            "draft_tokens": sum(tokens for tokens, _ in self._last),
            "accepted_tokens": sum(accepted for _, accepted in self._last),
        }

    def _nothing(self) -> dict[str, Counter[tuple[int, int]]]:
        return {source: Counter() for source in self._sources}


def _counts_of(source: str, found: Counter[tuple[int, int]]) -> SourceCounts:
    longest = max((accepted for _, accepted in found), default=0)
    return SourceCounts(
        source=source,
        drafts=found.total(),
        draft_tokens=sum(tokens * number for (tokens, _), number in found.items()),
        accepted=sum(accepted * number for (_, accepted), number in found.items()),
        accepted_at=tuple(
            sum(number for (_, accepted), number in found.items() if accepted > position)
            for position in range(longest)
        ),
    )

"""Counts of verified drafts: since the last report, and of the last thousand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from ...bus.messages import VerifiedDraft

_LAST = 1000
"""Drafts that `load` reports."""


class SourceCounts(NamedTuple):
    """Counts of one source.

    Attributes:
        drafts: Verified drafts.
        draft_tokens: Their tokens.
        accepted: Accepted tokens.
        accepted_at: `[positions]`, accepted tokens by position in the draft.
    """

    source: str
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_at: tuple[int, ...]


class DraftCounts:
    """Counts drafts of results, with one addition per draft."""

    def __init__(self, sources: Iterable[str]) -> None:
        """`sources`: the names of all sources."""
        self._sources = tuple(sources)
        # By source: (tokens, accepted tokens) of drafts.
        self._new: dict[str, Counter[tuple[int, int]]] = self._nothing()
        self._last: deque[tuple[int, int]] = deque(maxlen=_LAST)

    def add(self, drafts: Iterable[VerifiedDraft]) -> None:
        """Count drafts."""
        for draft in drafts:
            became = draft.num_tokens, draft.num_accepted
            self._new.setdefault(draft.source, Counter())[became] += 1
            self._last.append(became)

    def take(self) -> list[SourceCounts]:
        """Return the counts of each source since the last call."""
        new, self._new = self._new, self._nothing()
        return [_counts_of(source, found) for source, found in new.items()]

    def load(self) -> dict[str, int]:
        """Return drafts, tokens and accepted tokens of the last thousand drafts."""
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

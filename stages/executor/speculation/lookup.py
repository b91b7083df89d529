"""Drafts from what came behind the same tokens before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from .drafts import NO_DRAFT, Draft, DraftContext
from .token_index import Match, TokenIndex, Writer

_LONGEST_FACTOR = 2
"""A draft has at most so many tokens for each that is the same before it."""

_LEAST_CHANCE = 0.1
"""A draft ends before it becomes less likely than this."""

_LONGER_COUNTS = 8.0
"""One more token that is the same counts so many times as much."""

_MOST_AT_ONCE = 8192
"""So many tokens are taken into an index in one go, in about 2 ms, and the rest in later steps."""


@dataclass(slots=True)
class _Followed:
    """A sequence.

    Attributes:
        writer: Where it is written.
        num_tokens: How many of its tokens have been.
    """

    writer: Writer
    num_tokens: int


class LookupSource(ABC):
    """Looks for the last tokens of a sequence among those of an index, and drafts what came next.

    Which tokens it looks among is up to its subclasses.
    """

    name: ClassVar[str]

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._followed: dict[int, _Followed] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.observe(contexts)
        find, followed = self._index.find, self._followed
        drafts = []
        for context in contexts:
            known = followed.get(context.seq_id)
            if known is None or known.num_tokens != len(context.tokens):
                drafts.append(NO_DRAFT)
                continue
            match = find(known.writer, context.limit)
            drafts.append(NO_DRAFT if match is None else _draft(match, context.limit, self.name))
        return drafts

    def observe(self, contexts: Sequence[DraftContext]) -> None:
        left = _MOST_AT_ONCE
        followed = self._followed
        for context in contexts:
            known = followed.get(context.seq_id)
            if known is None or known.num_tokens != len(context.tokens):
                left -= self._follow(context, known, left)

    def forget(self, row: int, seq_id: int) -> None:
        self._followed.pop(seq_id, None)

    def clear(self) -> None:
        self._followed.clear()

    @abstractmethod
    def _begin(self, context: DraftContext) -> tuple[Writer, int]:
        """Where a sequence is to be written, and from which of its tokens on."""

    def _follow(self, context: DraftContext, followed: _Followed | None, most: int) -> int:
        """Writes down what is new of a sequence, and says how many tokens that were."""
        tokens = context.tokens
        if followed is None or followed.num_tokens > len(tokens):
            if not len(tokens):
                return 0
            followed = _Followed(*self._begin(context))
            self._followed[context.seq_id] = followed
        new = min(len(tokens) - followed.num_tokens, most)
        if new:
            start = followed.num_tokens
            followed.num_tokens = start + new
            self._index.extend(followed.writer, tokens[start : start + new])
        return new


_CERTAINTIES = tuple(1 - 1 / (1 + number) for number in range(256))
"""How much it says that so many tokens are the same, or places of them."""


def _draft(match: Match, limit: int, source: str) -> Draft:
    """What most often came behind the longest contexts.

    The likelihood of a token is its share of what came behind the same tokens, those of the draft
    included, times how much so many of them say.
    """
    found = match.continuations
    length = match.length + len(found) - 1
    limit = min(limit, match.length * _LONGEST_FACTOR)
    if len(found) == 1 or found.count(found[0]) == len(found):
        tokens = tuple(found[0][:limit])
        return Draft(tokens, _CERTAINTIES[length : length + len(tokens)], source)
    return _vote(match, limit, source)


def _vote(match: Match, limit: int, source: str) -> Draft:
    """The draft where what was found does not all go on alike."""
    found = match.continuations
    weights = [_LONGER_COUNTS ** (same - match.length) for same in match.lengths]
    weights = weights or [1.0] * len(found)
    drafted: list[int] = []
    likelihoods: list[float] = []
    chance = 1.0
    columns = list(zip_longest(*found))
    for place in range(limit):
        if place == len(columns):
            break
        said = columns[place]
        best, likelihood = said[0], _CERTAINTIES[match.length + place + len(found) - 1]
        if best is None or said.count(best) != len(said):
            votes: dict[int, float] = {}
            for token, weight in zip(said, weights, strict=True):
                if token is not None:
                    votes[token] = votes.get(token, 0.0) + weight
            # Of several with the most votes the first one, which is the newest.
            best = max(votes, key=votes.__getitem__)
            likelihood *= votes[best] / sum(votes.values())
            weights = [weight for token, weight in zip(said, weights, strict=True) if token == best]
            found = [tokens for token, tokens in zip(said, found, strict=True) if token == best]
            columns = list(zip_longest(*found))
        chance *= likelihood
        if chance < _LEAST_CHANCE:
            break
        drafted.append(best)
        likelihoods.append(likelihood)
    return Draft(tuple(drafted), tuple(likelihoods), source) if drafted else NO_DRAFT

"""What admission has taken and not answered: the only thing that a failure of the lane leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from ...bus.channel import RequestEntry
from ...bus.control import Cancel
from ...bus.messages import AdmittedRequest, RecoveredSample, RecoveryItem
from ...config import MAX_INT64
from .checks import request_id_of

Verdict = Literal["go", "alone", "dead"]

RECOVER_BATCH = 64
"""Requests that streaming is asked about with one message."""

RECOVER_TOKENS = 1 << 20
"""Tokens of their prompts in one message, unless one alone has more."""


class Unanswered(msgspec.Struct):
    """An entry of the requests queue whose terminal message is not known to be written.

    Attributes:
        entry: As it was taken.
        request: What was let in; None for an entry that was refused.
        deadline_ns: On this process's clock.
        end: How the request is to end, once that is decided here: refused, cancelled, too late.
        deaths: Failures of the lane that it may have caused, since it last made progress.
        progress: Tokens that streaming had of it at the last failure.
        suspected: It was in the lane when a stage failed, and streaming was not heard since.
    """

    entry: RequestEntry
    request: AdmittedRequest | None = None
    deadline_ns: int | None = None
    end: Cancel | None = None
    deaths: int = 0
    progress: int = 0
    suspected: bool = False

    @property
    def entry_id(self) -> str:
        return self.entry.entry_id

    @property
    def request_id(self) -> str:
        return request_id_of(self.entry)

    @property
    def trace(self) -> tuple[str, str]:
        """Traceparent and tracestate: where the other stages' spans of the request belong; of one
        that was refused, what it came with."""
        where = self.entry if self.request is None else self.request.info
        return where.traceparent, where.tracestate

    def recovery_item(self) -> RecoveryItem:
        """What streaming is asked with."""
        if self.request is not None:
            info = self.request.info
            prompt = () if info.ref_temperature is None else self.request.token_ids
            return RecoveryItem(self.request_id, self.entry_id, info, prompt)
        key = self.end.result_key if self.end is not None else self.entry_id
        return RecoveryItem(key, self.entry_id)


class Ledger:
    """The unanswered entries in the order in which they were taken.

    A request may be the reason why its lane fails, so each counts the failures that hit it without
    progress in between. The last chance is given alone, so that no other is taken for the culprit.
    """

    def __init__(self, max_lane_deaths: int) -> None:
        self._max_lane_deaths = max_lane_deaths
        self._entries: dict[str, Unanswered] = {}
        # Request id to entry id, of those that were let in: a refused duplicate has the same
        # request id and another entry.
        self._let_in: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Unanswered]:
        return iter(list(self._entries.values()))

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    def add(self, item: Unanswered) -> None:
        """Enters an entry, or what was decided about it."""
        entry_id = item.entry.entry_id
        self._entries[entry_id] = item
        if item.request is not None:
            self._let_in[item.request.info.request_id] = entry_id

    def get(self, entry_id: str) -> Unanswered | None:
        """An entry; None when it is answered or was never taken."""
        return self._entries.get(entry_id)

    def entry_of(self, request_id: str) -> str | None:
        """The entry of a request that was let in and is not answered, None for any other."""
        return self._let_in.get(request_id)

    def remove(self, entry_id: str) -> Unanswered | None:
        """The entry is answered, or another lane's. Returns it, None when it was not there."""
        item = self._entries.pop(entry_id, None)
        if item is not None and item.request is not None:
            del self._let_in[item.request.info.request_id]
        return item

    def suspect(self, outside: Collection[str]) -> None:
        """A stage failed by itself: any request in the lane may be the reason.

        Args:
            outside: Entries that are not in the lane, since they wait to run alone.
        """
        for item in self._entries.values():
            if item.entry_id not in outside:
                item.suspected = item.request is not None and item.end is None

    def judge(self, item: Unanswered, samples: Sequence[RecoveredSample]) -> Verdict:
        """Whether a request goes on, with the others or alone, now that its tokens are known."""
        progress = sum(len(sample.token_ids) + sample.finished for sample in samples)
        if progress > item.progress:
            item.deaths = 0
        item.deaths += item.suspected
        item.progress, item.suspected = progress, False
        if item.deaths >= self._max_lane_deaths:
            return "dead"
        return "alone" if item.deaths and item.deaths == self._max_lane_deaths - 1 else "go"


def recovery_items(items: Iterable[Unanswered]) -> Iterator[tuple[RecoveryItem, ...]]:
    """What streaming is asked with, in messages that no link refuses for their size."""
    some: list[RecoveryItem] = []
    num_tokens = 0
    for item in map(Unanswered.recovery_item, items):
        num_tokens += len(item.prompt_token_ids)
        if some and (len(some) == RECOVER_BATCH or num_tokens > RECOVER_TOKENS):
            yield tuple(some)
            some, num_tokens = [], len(item.prompt_token_ids)
        some.append(item)
    if some:
        yield tuple(some)


def entry_deadline_ns(entry: RequestEntry, received_ns: int) -> int | None:
    """When an entry's time is over, on this process's clock; it was `received_ns` here."""
    budget_ns = entry.budget_ns
    if budget_ns is None:
        return None
    return int(received_ns - entry.waited_ns + max(0, min(budget_ns, MAX_INT64)))

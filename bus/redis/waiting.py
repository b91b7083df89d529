"""Whose the entries are that nobody has taken, as far as was looked."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from ..keys import parse_id

START = b"0-0"


class WaitingEntries:
    """Entries in the order of the stream, by tenant. Each is looked at once.

    Attributes:
        position: The last entry that was looked at.
    """

    def __init__(self) -> None:
        self.position = START
        self._taken = START
        self._tenants: dict[bytes, str] = {}
        self._of: dict[str, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def clear(self) -> None:
        """Forgets all; the stream is to be looked at from its beginning."""
        self.position = self._taken = START
        self._tenants.clear()
        self._of.clear()

    def add(self, rows: Iterable[tuple[bytes, str]]) -> None:
        """Adds entries behind the last one, each with its tenant."""
        for entry_id, tenant in rows:
            self.position = entry_id
            self._tenants[entry_id] = tenant
            self._of.setdefault(tenant, deque()).append(entry_id)

    def forget_taken(self, last: bytes) -> None:
        """Entries up to this one were handed out."""
        if parse_id(last) < parse_id(self._taken):
            self.clear()  # the group was made again, and all wait again
        self._taken = last
        if parse_id(self.position) < parse_id(last):
            self.position = last
        for entry_id in list(self._tenants):
            if parse_id(entry_id) > parse_id(last):
                return
            of = self._of[self._tenants.pop(entry_id)]
            of.popleft()

    def take_newest(self, number: int) -> list[bytes]:
        """Takes out so many entries: each time the newest of a tenant that has most.

        So nobody loses one while somebody else has more.
        """
        chosen: list[bytes] = []
        self._of = {tenant: of for tenant, of in self._of.items() if of}
        order = [(-len(of), _newest_first(of), tenant) for tenant, of in self._of.items()]
        heapq.heapify(order)
        while order and len(chosen) < number:
            tenant = heapq.heappop(order)[2]
            of = self._of[tenant]
            chosen.append(of.pop())
            del self._tenants[chosen[-1]]
            if of:
                heapq.heappush(order, (-len(of), _newest_first(of), tenant))
        return chosen


def _newest_first(of: deque[bytes]) -> tuple[int, int]:
    """Of tenants that have as many, the one whose newest entry is the newest."""
    milliseconds, number = parse_id(of[-1])
    return -milliseconds, -number

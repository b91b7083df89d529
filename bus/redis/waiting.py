"""Which tenants have entries waiting that nobody has taken, as far as the stream was read."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from ...store.redis.keys import parse_id

START = b"0-0"


class WaitingEntries:
    """Entries that wait, by tenant and in the order of the stream. Each is read only once.

    Attributes:
        position: The last entry that was read.
    """

    def __init__(self) -> None:
        self.position = START
        self._taken = START
        self._tenants: dict[bytes, str] = {}
        self._by_tenant: dict[str, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def clear(self) -> None:
        """Forgets all; the stream is to be looked at from its beginning."""
        self.position = self._taken = START
        self._tenants.clear()
        self._by_tenant.clear()

    def add(self, rows: Iterable[tuple[bytes, str]]) -> None:
        """Adds entries behind the last one, each with its tenant."""
        for entry_id, tenant in rows:
            self.position = entry_id
            self._tenants[entry_id] = tenant
            self._by_tenant.setdefault(tenant, deque()).append(entry_id)

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
            entries = self._by_tenant[self._tenants.pop(entry_id)]
            entries.popleft()

    def take_newest(self, number: int) -> list[bytes]:
        """Takes out so many entries: each time the newest of a tenant that has most.

        So nobody loses one while somebody else has more.
        """
        chosen: list[bytes] = []
        self._by_tenant = {
            tenant: entries for tenant, entries in self._by_tenant.items() if entries
        }
        order = [
            (-len(entries), _newest_first(entries), tenant)
            for tenant, entries in self._by_tenant.items()
        ]
        heapq.heapify(order)
        while order and len(chosen) < number:
            tenant = heapq.heappop(order)[2]
            entries = self._by_tenant[tenant]
            chosen.append(entries.pop())
            del self._tenants[chosen[-1]]
            if entries:
                heapq.heappush(order, (-len(entries), _newest_first(entries), tenant))
        return chosen


def _newest_first(entries: deque[bytes]) -> tuple[int, int]:
    """Of tenants that have as many, the one whose newest entry is the newest."""
    milliseconds, number = parse_id(entries[-1])
    return -milliseconds, -number

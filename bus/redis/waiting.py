"""Untaken entries by tenant, as far as the stream was read."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from ...store.redis.keys import parse_id

START = b"0-0"


class WaitingEntries:
    """Untaken entries by tenant, in stream order. Each entry is read once.

    Attributes:
        position: The last entry read.
    """

    def __init__(self) -> None:
        self.position = START
        self._taken = START
        self._tenants: dict[bytes, str] = {}
        self._by_tenant: dict[str, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def clear(self) -> None:
        """Forget all entries; reading starts over."""
        self.position = self._taken = START
        self._tenants.clear()
        self._by_tenant.clear()

    def add(self, rows: Iterable[tuple[bytes, str]]) -> None:
        """Add entries after the last one, each with its tenant."""
        for entry_id, tenant in rows:
            self.position = entry_id
            self._tenants[entry_id] = tenant
            self._by_tenant.setdefault(tenant, deque()).append(entry_id)

    def forget_taken(self, last: bytes) -> None:
        """Drop entries up to the last one handed out."""
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
        """Remove and return entries: repeatedly the newest of the tenant with most.

        So no tenant loses an entry while another has more.
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
    """Sort key among tenants with equally many: the one with the newest entry first."""
    milliseconds, number = parse_id(entries[-1])
    return -milliseconds, -number

"""Limits within one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .limits import Charge, Limit, Reservation
from .shares import Counted, commit, reserve

TIDY_EVERY_MS = 60_000
"""Interval at which unused limits are dropped."""


class MemoryLimits:
    """`LimitStore` within one event loop."""

    def __init__(self, now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000):
        self._now_ms = now_ms
        self._counted: dict[tuple[str, int], Counted] = {}
        self._reservations = 0
        self._tidied_ms = 0

    async def reserve(self, charges: Sequence[Charge]) -> Reservation:
        now_ms = self._now_ms()
        self._tidy(now_ms)
        self._reservations += 1
        return reserve(f"{self._reservations}", tuple(charges), self._find, now_ms)

    def commit(self, reservation: Reservation, amounts: Sequence[int]) -> None:
        commit(reservation, amounts, self._find)

    def _find(self, limit: Limit) -> Counted:
        key = (limit.name, limit.window_s)
        if key not in self._counted:
            self._counted[key] = Counted(b"", limit)
        return self._counted[key]

    def _tidy(self, now_ms: int) -> None:
        if now_ms < self._tidied_ms + TIDY_EVERY_MS:
            return
        self._tidied_ms = now_ms
        for counted in self._counted.values():
            counted.advance(now_ms)
        self._counted = {key: each for key, each in self._counted.items() if each.own}

"""One process's view of a limit: its own share, and the shares of other processes.

Independent of clock and server. A share holds amounts by slice of the window; for concurrency there
is one slice, 0, with an expiry of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .limits import SLICES, Charge, Limit, Reservation, Room, slice_ms

FORGOTTEN_MS = 60_000
"""Time after which an expired share of a dead process is removed."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One process's usage of a limit.

    Attributes:
        amounts: By slice.
        until_ms: Expiry by the server's clock; 0 for a window, whose slices expire.
    """

    amounts: dict[int, int]
    until_ms: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Share).decode


class Counted:
    """A limit's sum over all processes.

    Attributes:
        key: Key of its shares.
        limit: As named last.
        own: This process's usage, by slice.
        written: The server's copy of it; None if unknown.
        sum: Usage of all processes.
        renew_at_s, expire_at_s: When to rewrite the share regardless, and when to extend its expiry
            on the server, on this process's clock.
    """

    def __init__(self, key: bytes, limit: Limit) -> None:
        self.key = key
        self.limit = limit
        self.step_ms = slice_ms(limit)
        self.own: dict[int, int] = {}
        self.written: dict[int, int] | None = {}
        self.renew_at_s = 0.0
        self.expire_at_s = 0.0
        self._others: dict[int, int] = {}
        self.sum = 0

    def is_unwritten(self, now_s: float) -> bool:
        """Return whether the server's copy is outdated, or about to expire."""
        if self.own != self.written:
            return True
        return bool(self.own) and not self.step_ms and self.renew_at_s <= now_s

    def slice_at(self, now_ms: int) -> int:
        return now_ms // self.step_ms if self.step_ms else 0

    def advance(self, now_ms: int) -> None:
        """Drop slices outside the window."""
        if not self.step_ms:
            return
        first = self.slice_at(now_ms) - SLICES
        self.sum -= _drop(self.own, first) + _drop(self._others, first)
        if self.written and self.own:
            # Expired slices count nowhere, so they need no write. An empty share must be removed.
            _drop(self.written, first)

    def put(self, place: int, amount: int) -> None:
        """Add usage of this process in the newest slice."""
        self.sum += amount
        self.own[place] = self.own.get(place, 0) + amount
        if not (self.step_ms or self.own[place]):
            del self.own[place]

    def commit(self, place: int, amount: int) -> None:
        """Correct this process's usage in a slice; outside the window do nothing."""
        if place in self.own:
            self.put(place, amount)

    def wait_ms(self, excess: int, now_ms: int) -> float:
        """Return the time until this much leaves the window; infinite if unknown."""
        if not self.step_ms:
            return math.inf
        amounts = Counter(self._others)
        amounts.update(self.own)
        for place, amount in sorted(amounts.items()):
            excess -= amount
            if excess <= 0:
                return self._ends_ms(place) - now_ms
        return math.inf

    def room(self, most: int, now_ms: int) -> Room:
        newest = max((*self.own, *self._others), default=None) if self.step_ms else None
        reset_ms = 0 if newest is None else self._ends_ms(newest) - now_ms
        return Room(max(0, most - self.sum), reset_ms / 1000)

    def encoded(self, until_ms: int) -> bytes:
        """Encode this process's share; concurrency expires at `until_ms`."""
        return _encode(Share(self.own, 0 if self.step_ms else until_ms))

    def read_others(self, shares: Iterable[bytes], now_ms: int) -> None:
        """Replace the other processes' usage by their shares."""
        found: Counter[int] = Counter()
        for share in filter(None, map(_share, shares)):
            if self.step_ms or share.until_ms > now_ms:
                found.update(share.amounts)
        self._others = dict(sorted(found.items()))
        self.sum = sum(self.own.values()) + sum(found.values())
        self.advance(now_ms)

    def forgotten(self, shares: Mapping[bytes, bytes], now_ms: int) -> list[bytes]:
        """Return the processes whose shares expired so long ago that they must be dead."""
        return [
            gateway
            for gateway, raw in shares.items()
            if (share := _share(raw)) is not None and self._ended_ms(share) < now_ms - FORGOTTEN_MS
        ]

    def _ended_ms(self, share: Share) -> int:
        if not self.step_ms:
            return share.until_ms
        return self._ends_ms(max(share.amounts, default=0))

    def _ends_ms(self, place: int) -> int:
        return (place + SLICES + 1) * self.step_ms


Find = Callable[[Limit], Counted]
"""Returns the counts of a limit."""


def reserve(
    reservation_id: str, charges: tuple[Charge, ...], find: Find, now_ms: int
) -> Reservation:
    """Reserve all charges or none, by the known sums."""
    # By the index of the refusing limit; infinite if it is unknown when there is room.
    waits_ms: dict[int, float] = {}
    counted = [find(charge.limit) for charge in charges]
    for place, (charge, each) in enumerate(zip(charges, counted, strict=True)):
        each.advance(now_ms)
        most = charge.limit.most
        if (excess := each.sum + charge.amount - most) > 0:
            never = charge.amount > most
            waits_ms[place] = math.inf if never else each.wait_ms(excess, now_ms)
    slices = tuple(each.slice_at(now_ms) for each in counted)
    if not waits_ms:
        for charge, each, at in zip(charges, counted, slices, strict=True):
            each.put(at, charge.amount)
    rooms = tuple(
        each.room(charge.limit.most, now_ms) for charge, each in zip(charges, counted, strict=True)
    )
    if waits_ms:
        longest = max(waits_ms, key=waits_ms.__getitem__)
        wait_s = waits_ms[longest] / 1000
        return Reservation("", charges, rooms, longest, wait_s if wait_s < math.inf else None)
    return Reservation(reservation_id, charges, rooms, slices=slices)


def commit(reservation: Reservation, amounts: Sequence[int], find: Find) -> None:
    """Apply `LimitStore.commit` to this process's usage."""
    for charge, amount, place in zip(reservation.charges, amounts, reservation.slices, strict=True):
        final = amount if charge.limit.window_s else 0
        find(charge.limit).commit(place, final - charge.amount)


def _drop(amounts: dict[int, int], first: int) -> int:
    """Drop the slices before `first`; return their sum."""
    dropped = 0
    while amounts and (oldest := next(iter(amounts))) < first:
        dropped += amounts.pop(oldest)
    return dropped


def _share(raw: bytes) -> Share | None:
    """Decode a share; None if unreadable, as of a newer version."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return None

"""A limit as one process sees it: its own share of what was taken, and what others say of theirs.

No clock and no server is here. A share is what was taken by slice of the window; of what is held
there is one slice, 0, which counts until a time of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .limits import SLICES, Charge, Limit, Reservation, Room, refusal, slice_ms

FORGOTTEN_MS = 60_000
"""How long a share stays that counts no more, unless its process removes it."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one process has taken from a limit.

    Attributes:
        amounts: By slice.
        until_ms: When it ends, by the server's clock; 0 of a window, whose slices say so.
    """

    amounts: dict[int, int]
    until_ms: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Share).decode


class Counted:
    """A limit's sum over all processes.

    Attributes:
        key: Where its shares are.
        limit: As it was named last.
        own: What this process has taken, by slice.
        written: What the server has of that, as far as it is known; None when it is not.
        sum: What all have taken.
        renew_at_s, expire_at_s: When it must be written again all the same, and the server told
            until when to keep it, on the clock of this process.
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
        """Whether the server does not have what it should, or not for much longer."""
        if self.own != self.written:
            return True
        return bool(self.own) and not self.step_ms and self.renew_at_s <= now_s

    def slice_at(self, now_ms: int) -> int:
        return now_ms // self.step_ms if self.step_ms else 0

    def advance(self, now_ms: int) -> None:
        """Drops what is out of the window."""
        if not self.step_ms:
            return
        first = self.slice_at(now_ms) - SLICES
        self.sum -= _drop(self.own, first) + _drop(self._others, first)
        if self.written and self.own:
            # Nobody counts it, so nothing need be written for that. A share of which nothing is
            # left is to be removed.
            _drop(self.written, first)

    def put(self, place: int, amount: int) -> None:
        """This process takes something in a slice, the newest one."""
        self.sum += amount
        self.own[place] = self.own.get(place, 0) + amount
        if not (self.step_ms or self.own[place]):
            del self.own[place]

    def commit(self, place: int, amount: int) -> None:
        """What it took there was so much more than was said; out of the window it is no matter."""
        if place in self.own:
            self.put(place, amount)

    def excess(self, amount: int, most: int) -> int:
        """By how much the sum would be too large if so much was taken; at most 0 if it fits."""
        return self.sum + amount - most

    def wait_ms(self, excess: int, now_ms: int) -> int | None:
        """How long until so much has left the window; None when nobody can tell."""
        if not self.step_ms:
            return None
        for place, amount in sorted(self._all().items()):
            excess -= amount
            if excess <= 0:
                return self._ends_ms(place) - now_ms
        return None

    def room(self, most: int, now_ms: int) -> Room:
        newest = max((*self.own, *self._others), default=None) if self.step_ms else None
        reset_ms = 0 if newest is None else self._ends_ms(newest) - now_ms
        return Room(max(0, most - self.sum), reset_ms / 1000)

    def encoded(self, until_ms: int) -> bytes:
        """This process's share, for others; what it holds counts until then."""
        return _encode(Share(self.own, 0 if self.step_ms else until_ms))

    def read_others(self, shares: Iterable[bytes], now_ms: int) -> None:
        """What the others have taken, as they say."""
        found: dict[int, int] = {}
        for share in filter(None, map(_share, shares)):
            if self.step_ms or share.until_ms > now_ms:
                for place, amount in share.amounts.items():
                    found[place] = found.get(place, 0) + amount
        self._others = dict(sorted(found.items()))
        self.sum = sum(self.own.values()) + sum(found.values())
        self.advance(now_ms)

    def forgotten(self, shares: Mapping[bytes, bytes], now_ms: int) -> list[bytes]:
        """Whose shares have counted no more for so long that their processes must be gone."""
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

    def _all(self) -> dict[int, int]:
        everything = dict(self._others)
        for place, amount in self.own.items():
            everything[place] = everything.get(place, 0) + amount
        return everything


Find = Callable[[Limit], Counted]
"""Finds what is counted of a limit."""


def reserve(
    reservation_id: str, charges: tuple[Charge, ...], find: Find, now_ms: int
) -> Reservation:
    """Takes all charges or none, by what is known."""
    waits_ms: dict[int, int | None] = {}
    counted = [find(charge.limit) for charge in charges]
    for place, (charge, each) in enumerate(zip(charges, counted, strict=True)):
        each.advance(now_ms)
        most = charge.limit.most
        if (excess := each.excess(charge.amount, most)) > 0:
            never = charge.amount > most
            waits_ms[place] = None if never else each.wait_ms(excess, now_ms)
    slices = tuple(each.slice_at(now_ms) for each in counted)
    if not waits_ms:
        for charge, each, at in zip(charges, counted, slices, strict=True):
            each.put(at, charge.amount)
    rooms = tuple(
        each.room(charge.limit.most, now_ms) for charge, each in zip(charges, counted, strict=True)
    )
    if waits_ms:
        return refusal(charges, rooms, waits_ms)
    return Reservation(reservation_id, charges, rooms, slices=slices)


def commit(reservation: Reservation, amounts: Sequence[int], find: Find) -> None:
    """As `LimitStore.commit`, of what this process has taken."""
    for charge, amount, place in zip(reservation.charges, amounts, reservation.slices, strict=True):
        final = amount if charge.limit.window_s else 0
        find(charge.limit).commit(place, final - charge.amount)


def _drop(amounts: dict[int, int], first: int) -> int:
    """Drops the slices before one; what they had."""
    dropped = 0
    while amounts and (oldest := next(iter(amounts))) < first:
        dropped += amounts.pop(oldest)
    return dropped


def _share(raw: bytes) -> Share | None:
    """None for what nobody can read, as of a version to come."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return None

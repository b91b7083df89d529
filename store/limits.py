"""Limits that all gateways share: so much in a sliding window of time, or so much at a time.

Whoever wants something takes it from all limits that concern it at once, or gets nothing of it.

A window moves in steps of a sixtieth of its length (`SLICES`). What was taken counts for at least
the window and for at most one such step longer: never is more granted within any time as long as
the window than the limit says, and room comes back a sixtieth late at most. That is the bound of
every implementation; what they may lose, and what then, each says for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

SLICES = 60
"""Steps in which a window moves."""


class Limit(msgspec.Struct, frozen=True):
    """What may be taken.

    Attributes:
        name: Whose it is, and of what; limits of the same name and window are the same.
        most: The largest sum, at least 0. Takers may differ about it while it is being changed.
        window_s: Within so many seconds, at least 1. 0: at the same time, until it is given back.
    """

    name: str
    most: int
    window_s: int = 0


class Charge(NamedTuple):
    """What is to be taken from a limit; `amount` is at least 0."""

    limit: Limit
    amount: int = 1


class Room(NamedTuple):
    """How a limit stands.

    Attributes:
        left: What can still be taken, at least 0.
        reset_s: When all of it is back, if nothing more is taken; 0.0 for what is held.
    """

    left: int
    reset_s: float


class Reservation(msgspec.Struct, frozen=True):
    """What came of a wish to take something.

    Attributes:
        reservation_id: Names it; "" when nothing was taken.
        charges: What was asked for.
        rooms: How each limit stands after it, in order.
        refused_by: The place of the limit that refused it, of several the one that does so for
            longest; None when it was granted.
        retry_after_s: When that limit will have room, if nothing more is taken; None when nobody
            can tell, since it depends on others' giving back, or when there will never be room,
            since the amount is more than the limit.
        slices: For each charge, the slice of its window in which it counts; 0 for what is held.
    """

    reservation_id: str
    charges: tuple[Charge, ...]
    rooms: tuple[Room, ...]
    refused_by: int | None = None
    retry_after_s: float | None = None
    slices: tuple[int, ...] = ()

    @property
    def granted(self) -> bool:
        return self.refused_by is None


class LimitStore(Protocol):
    """Takes from limits and gives back. Nobody has to announce a limit.

    What a process has taken that is killed goes on counting in windows; what it held is free, on
    Redis after `HELD_S`.
    """

    async def reserve(self, charges: Sequence[Charge]) -> Reservation:
        """Takes all charges, each of another limit, or none. Who cancels it has taken nothing.

        Raises:
            BusError: The transport can't be reached; nothing was taken.
            ChannelClosed: The bus was closed.
        """

    def commit(self, reservation: Reservation, amounts: Sequence[int]) -> None:
        """What was taken has turned out to be so much. To be called once, of what was granted.

        In a window the final amount stands in place of the first one, which may have been
        smaller, as if it had been taken then; what is held is given back, whatever `amounts` says
        of it. This process knows at once, others a moment later, once the transport can be reached.
        """


def slice_ms(limit: Limit) -> int:
    """The step in which its window moves, in milliseconds, rounded up."""
    return math.ceil(limit.window_s * 1000 / SLICES)


def refusal(
    charges: tuple[Charge, ...], rooms: tuple[Room, ...], waits_ms: dict[int, int | None]
) -> Reservation:
    """A refused reservation.

    Args:
        waits_ms: How long it takes until each limit that refuses has room, by its place.
    """

    def length(place: int) -> float:
        wait_ms = waits_ms[place]
        return math.inf if wait_ms is None else wait_ms

    longest = max(waits_ms, key=length)
    wait_ms = waits_ms[longest]
    retry_after_s = None if wait_ms is None else wait_ms / 1000
    return Reservation("", charges, rooms, refused_by=longest, retry_after_s=retry_after_s)

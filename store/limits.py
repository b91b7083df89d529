"""Limits shared by all gateways, over a sliding window or on concurrency.

A reservation covers several limits, atomically.

A window moves in steps of a sixtieth of its length (`SLICES`). A reservation counts for at least
the window and at most one step longer: no interval as long as the window is granted more than the
limit, and room returns at most a sixtieth late. Every implementation keeps this bound; each
documents its losses on failures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

SLICES = 60
"""Steps of a window."""


class Limit(msgspec.Struct, frozen=True):
    """A limit.

    Attributes:
        name: Its owner and kind; limits of the same name and window are the same.
        most: The largest sum, at least 0. Processes may disagree while it is being changed.
        window_s: Length of the window in seconds, at least 1. 0: a limit on concurrency, held until
            committed.
    """

    name: str
    most: int
    window_s: int = 0


class Charge(NamedTuple):
    """An amount, at least 0, to reserve from a limit."""

    limit: Limit
    amount: int = 1


class Room(NamedTuple):
    """State of a limit.

    Attributes:
        left: Available amount, at least 0.
        reset_s: Seconds until all of it is available, without further reservations; 0.0 for
            concurrency.
    """

    left: int
    reset_s: float


class Reservation(msgspec.Struct, frozen=True):
    """Result of a reservation.

    Attributes:
        reservation_id: Its id; "" if refused.
        charges: The requested amounts.
        rooms: State of each limit afterwards, in order.
        refused_by: Index of the refusing limit, the one with the longest wait of several; None if
            granted.
        retry_after_s: Seconds until that limit has room, without further reservations; None if
            unknown, since it depends on others' commits, or if the amount exceeds the limit.
        slices: For each charge, its slice of the window; 0 for concurrency.
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
    """Reservations from limits, which need no declaration.

    Reservations of a killed process keep counting in windows; its concurrency is free, on Redis
    after `HELD_S`.
    """

    async def reserve(self, charges: Sequence[Charge]) -> Reservation:
        """Reserve all charges, each of another limit, or none. A cancelled call reserves nothing.

        Raises:
            BusError: The transport can't be reached; nothing was reserved.
            ChannelClosed: The bus was closed.
        """

    def commit(self, reservation: Reservation, amounts: Sequence[int]) -> None:
        """Set the final amounts of a granted reservation, once.

        In a window the final amount replaces the reserved one, which may have been smaller, as of
        the time of the reservation; concurrency is released, whatever `amounts` says. Visible at
        once in this process, and a moment later in others, once the transport can be reached.
        """


def slice_ms(limit: Limit) -> int:
    """Return the step of a limit's window in milliseconds, rounded up."""
    return math.ceil(limit.window_s * 1000 / SLICES)

"""Lengths of the requests queue."""

from __future__ import annotations

from typing import NamedTuple


class Backlog(NamedTuple):
    """Entries of the requests queue.

    Attributes:
        waiting: Untaken entries.
        pending: Entries taken by any lane, and not acknowledged.
        dead: Dead letters.
        queue_length: Requests without a begun sample, taken or not. About a second old; requests of
            a lane that is lost, or silent for five seconds, count as not begun.
    """

    waiting: int
    pending: int
    dead: int
    queue_length: int

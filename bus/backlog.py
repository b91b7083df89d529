"""How much of the requests queue waits, and how much is being worked on."""

from __future__ import annotations

from typing import NamedTuple


class Backlog(NamedTuple):
    """Entries of the requests queue.

    Attributes:
        waiting: Those that nobody has taken.
        pending: Those that were taken, by any lane, and not acknowledged.
        dead: The dead letters.
        queue_length: Requests that wait until the first of their samples begins, whether anybody
            has taken them or not. It is about a second old, and counts what has begun in a lane
            that is lost, or has said nothing for five seconds.
    """

    waiting: int
    pending: int
    dead: int
    queue_length: int

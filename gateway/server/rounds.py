"""Work of many connections at once, done a little at a time so that none waits for all others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

ROUND_S = 0.002
"""How long a round may take, beyond its last piece of work. Between two rounds the event loop does
what else there is, so that many clients at once delay everybody by a few milliseconds each time."""

MOST_IN_A_ROUND = 4
"""What a piece of work begins goes on behind the round, and counts there as well."""

CROWD = 256
"""Pieces of work of one client alone that wait. Beyond them the event loop is left to those who
come next, and the processors to the stages."""

CROWD_PAUSE_S = 0.005
"""Between two rounds of a crowd. What it begins waits in the pipeline anyway."""

Work = Callable[[], None]


class Rounds:
    """Pieces of work, done soon and in order of arrival by client; clients take turns."""

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._queues: OrderedDict[bytes, deque[Work]] = OrderedDict()
        self._due: asyncio.Handle | None = None

    def put(self, client: bytes, work: Work) -> None:
        """Has a piece of work done in one of the next rounds; called on the event loop.

        Args:
            client: Whose it is.
            work: Takes no more than a millisecond or so, and raises nothing.
        """
        self._queues.setdefault(client, deque()).append(work)
        self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queues:
            return
        if self._is_crowd():
            self._due = self._due or loop.call_later(CROWD_PAUSE_S, self._round, loop)
            return
        if isinstance(self._due, asyncio.TimerHandle):  # somebody else has come
            self._due.cancel()
            self._due = None
        self._due = self._due or loop.call_soon(self._round, loop)

    def _is_crowd(self) -> bool:
        return len(self._queues) == 1 and len(next(iter(self._queues.values()))) > CROWD

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = None
        end_s = loop.time() + ROUND_S
        try:
            for done in range(MOST_IN_A_ROUND):
                if not self._queues or (done and loop.time() >= end_s):
                    break
                self._next()()
        finally:
            self._go_on(loop)

    def _next(self) -> Work:
        client, queue = next(iter(self._queues.items()))
        work = queue.popleft()
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        return work

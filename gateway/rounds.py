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

Work = Callable[[], None]


class Rounds:
    """Pieces of work, done soon and in order of arrival by client; clients take turns."""

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._queues: OrderedDict[bytes, deque[Work]] = OrderedDict()
        self._due = False

    def put(self, client: bytes, work: Work) -> None:
        """Has a piece of work done in one of the next rounds; called on the event loop.

        Args:
            client: Whose it is.
            work: Takes no more than a millisecond or so, and raises nothing.
        """
        self._queues.setdefault(client, deque()).append(work)
        self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._queues and not self._due:
            self._due = True
            loop.call_soon(self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = False
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

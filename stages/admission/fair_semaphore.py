"""A semaphore whose places go round by tenant: one that wants many waits behind its own."""

from __future__ import annotations

from collections import OrderedDict, deque

import anyio


class FairSemaphore:
    """A semaphore that serves its waiting tenants round robin, each in its own order."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[anyio.Event]] = OrderedDict()

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; `release` hands it on."""
        if self._free:
            self._free -= 1
            return
        event = anyio.Event()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.release()
            else:
                queue.remove(event)
                if not queue:
                    del self._waiting[tenant]
            raise

    def release(self) -> None:
        """Hand the place to the next tenant."""
        if not self._waiting:
            self._free += 1
            return
        tenant, queue = self._waiting.popitem(last=False)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue

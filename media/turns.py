"""Turns of tenants at a few places, by the time that each has used."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from ..config import ImagesConfig
from .decoder import SPARE, DecodedImage, ImageDecoder

T = TypeVar("T")


class FairSemaphore:
    """A semaphore that serves the waiting tenant with the fewest places, then the least time used.

    Time counts from a tenant's first place until none of its work is left; a newcomer begins with
    the time of the tenant that was served last (start-time fair queueing). Each tenant's own order
    is kept.
    """

    def __init__(self, places: int, spare: int = 0) -> None:
        """Args:
        places: For anyone.
        spare: More, for tenants that hold no place.
        """
        self._places, self._spare = places, spare
        self._taken = 0
        self._holds: Counter[str] = Counter()
        self._waiting: dict[str, deque[anyio.Event]] = {}
        self._used_s: dict[str, float] = {}
        self._served_s = 0.0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, hold it, and charge its time to the tenant."""
        await self.acquire(tenant)
        start_s = anyio.current_time()
        try:
            yield
        finally:
            self.release(tenant, anyio.current_time() - start_s)

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; `release` hands it on."""
        self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), self._served_s)
        if self._is_free(tenant):
            self._grant(tenant)
            return
        event = anyio.Event()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.release(tenant)
            else:
                queue.remove(event)
                if not queue:
                    del self._waiting[tenant]
            raise

    def release(self, tenant: str, used_s: float = 0.0) -> None:
        """Free a tenant's place, and charge it for so much time."""
        self._taken -= 1
        self._holds[tenant] -= 1
        self._used_s[tenant] += used_s
        while free := [each for each in self._waiting if self._is_free(each)]:
            after = min(free, key=lambda each: (self._holds[each], self._used_s[each]))
            queue = self._waiting[after]
            queue.popleft().set()
            if not queue:
                del self._waiting[after]
            self._grant(after)
        if not self._taken:
            self._served_s = 0.0
        # Who owes nothing is a newcomer.
        self._holds = +self._holds
        active = self._holds.keys() | self._waiting.keys()
        self._used_s = {
            each: used_s
            for each, used_s in self._used_s.items()
            if each in active or (self._taken and used_s > self._served_s)
        }

    def _is_free(self, tenant: str) -> bool:
        spare = 0 if self._holds[tenant] else self._spare
        return self._taken < self._places + spare

    def _grant(self, tenant: str) -> None:
        self._taken += 1
        self._holds[tenant] += 1
        self._served_s = max(self._served_s, self._used_s[tenant])


class FairDecoder:
    """Decodes images of tenants, in turns."""

    def __init__(self, decoder: ImageDecoder, config: ImagesConfig) -> None:
        self._decoder = decoder
        self._turns = FairSemaphore(config.decoders, SPARE)
        self._threads = anyio.CapacityLimiter(config.decoders + SPARE)

    async def decode(self, data: bytes, where: str, tenant: str, *, alone: bool) -> DecodedImage:
        """Decode an image in its tenant's turn; see `ImageDecoder.decode`."""
        work = partial(self._decoder.decode, data, where, alone=alone)
        return await self.run(tenant, work)

    async def size(self, data: bytes, where: str, tenant: str) -> tuple[int, int]:
        """Return an image's size in its tenant's turn; see `ImageDecoder.size`."""
        return await self.run(tenant, partial(self._decoder.size, data, where))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work about images in a thread, in a turn of its tenant."""
        async with self._turns.turn(tenant):
            return await anyio.to_thread.run_sync(work, limiter=self._threads)

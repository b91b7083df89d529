"""Images as the vision part takes them, by name, shared by a deployment's processes.

An image is stored once for each name, however many requests hold it. A lease keeps it while a
request is in flight; images without one stay until others need the room, the longest unused first.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import msgspec

MOST_BYTES = 1 << 30
"""Default of `put`'s `max_bytes`."""

FOR_EVER = float("inf")


class StoredImage(msgspec.Struct, frozen=True):
    """A processed image.

    Attributes:
        width, height: Width and height of the image itself, in pixels.
        features: The inputs of the model's vision part, a safetensors file.
    """

    width: int
    height: int
    features: bytes


def name_of(*parts: str) -> str:
    """Return the name of an image in the store, 64 characters: a hash of the image's id and of all
    that its features depend on, or that must not be shared."""
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(framed.encode("utf-8", "surrogatepass")).hexdigest()


class ImageUsage(NamedTuple):
    """Number of stored images, how many are held, and the bytes of all."""

    images: int
    held: int
    num_bytes: int


NOTHING_STORED = ImageUsage(0, 0, 0)


class ImageStore(Protocol):
    """Images by name.

    Methods wait while the transport is unreachable.

    Raises:
        BusError: The transport refuses a command.
        ChannelClosed: The bus was closed.
    """

    async def put(
        self,
        id: str,
        image: StoredImage,
        *,
        holder: str = "",
        for_s: float = FOR_EVER,
        max_bytes: int = MOST_BYTES,
    ) -> bool:
        """Store an image, unless it is there, and hold it.

        Args:
            id: Id, from `name_of`.
            holder: As for `hold`; "" for no lease.
            for_s: As for `hold`.
            max_bytes: Limit on all images together.

        Returns:
            Whether it is stored; False if leases leave no room.
        """

    async def get(self, id: str) -> StoredImage | None:
        """Return an image; None if it is unknown."""

    async def hold(
        self, ids: Collection[str], holder: str, for_s: float = FOR_EVER
    ) -> list[tuple[int, int] | None]:
        """Take or extend leases on images.

        Args:
            ids: Ids of the images.
            holder: The lease's name, such as the entry of a request, in whatever process.
            for_s: Time until the lease ends by itself; a shorter time than before is ignored.

        Returns:
            For each id the width and height; None if there is no such image.
        """

    async def release(self, ids: Collection[str], holder: str) -> None:
        """End a holder's leases on images, if it has any."""

    async def usage(self) -> ImageUsage:
        """Return what is stored."""


class MemoryImages:
    """`ImageStore` within one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._images: dict[str, StoredImage] = {}
        self._bytes = 0
        self._until_s: dict[str, dict[str, float]] = {}
        # Without a lease, the longest unused first.
        self._free: OrderedDict[str, None] = OrderedDict()

    async def put(
        self,
        id: str,
        image: StoredImage,
        *,
        holder: str = "",
        for_s: float = FOR_EVER,
        max_bytes: int = MOST_BYTES,
    ) -> bool:
        self._sweep()
        if id not in self._images:
            size = len(image.features)
            while self._bytes + size > max_bytes:
                if not self._free:
                    return False
                evicted, _ = self._free.popitem(last=False)
                self._bytes -= len(self._images.pop(evicted).features)
            self._images[id] = image
            self._bytes += size
            self._free[id] = None
        if holder:
            self._hold(id, holder, for_s)
        elif id in self._free:
            self._free.move_to_end(id)
        return True

    async def get(self, id: str) -> StoredImage | None:
        return self._images.get(id)

    async def hold(
        self, ids: Collection[str], holder: str, for_s: float = FOR_EVER
    ) -> list[tuple[int, int] | None]:
        self._sweep()
        found: list[tuple[int, int] | None] = []
        for id in ids:
            image = self._images.get(id)
            if image is not None:
                self._hold(id, holder, for_s)
            found.append(None if image is None else (image.width, image.height))
        return found

    async def release(self, ids: Collection[str], holder: str) -> None:
        for id in ids:
            leases = self._until_s.get(id, {})
            if leases.pop(holder, None) is not None and not leases:
                self._release(id)

    async def usage(self) -> ImageUsage:
        self._sweep()
        return ImageUsage(len(self._images), len(self._until_s), self._bytes)

    def _hold(self, id: str, holder: str, for_s: float) -> None:
        leases = self._until_s.setdefault(id, {})
        leases[holder] = max(leases.get(holder, 0.0), self._now_s() + for_s)
        self._free.pop(id, None)

    def _release(self, id: str) -> None:
        del self._until_s[id]
        self._free[id] = None

    def _sweep(self) -> None:
        """End the leases whose time is over."""
        now_s = self._now_s()
        for id, leases in list(self._until_s.items()):
            over = [holder for holder, until_s in leases.items() if until_s <= now_s]
            for holder in over:
                del leases[holder]
            if not leases:
                self._release(id)

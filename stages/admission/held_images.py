"""Images of requests in the store: held while their requests are in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...bus.entries import RequestEntry
from ...bus.media import MediaItem
from ...bus.public import GenerateRequest
from ...config import BusError, ChannelClosed, ImagesConfig, RequestError
from ...store.images import FOR_EVER, ImageStore, StoredImage
from .arrivals import Tokenized, Tokens
from .images import Known

LEASE_S = 300.0
"""Lease of an image on a durable bus: the time in which a lane's successor takes its entries over.
Renewed every third of it."""

FULL_RETRY_S = 1.0
"""Seconds after which the store may have room: requests in flight end all the time."""


class HeldImages:
    """Puts images of requests into the store, and holds them there.

    The holder of a lease is the entry, so another lane that takes the entry over extends the same
    lease. In memory leases have no end of their own: they are dropped with the process.

    Attributes:
        held: Ids of images by the entry's key.
    """

    def __init__(self, store: ImageStore, config: ImagesConfig, *, durable: bool) -> None:
        self._store, self._max_bytes = store, config.store_bytes
        self._for_s = LEASE_S if durable else FOR_EVER
        self.held: dict[str, frozenset[str]] = {}

    async def known(self, entry: RequestEntry) -> Known:
        """Hold the images that a request names by id, and return their sizes.

        Raises:
            RequestError: The store can't be used.
        """
        request = entry.request
        assert isinstance(request, GenerateRequest)
        named = list(dict.fromkeys(image.id for image in request.images if image.id))
        if not named:
            return {}
        return await self._hold(entry.key, named)

    async def put(self, entry: RequestEntry, tokenized: Tokenized) -> Tokenized:
        """Store the images of a tokenised request; return the request without their pixels.

        The result is the refusal if there is no room.
        """
        if isinstance(tokenized, Exception) or not tokenized.media:
            return tokenized
        try:
            await self._put(entry.key, tokenized.pixels)
        except RequestError as error:
            return error
        return tokenized._replace(pixels=())

    async def missing(self, key: str, media: Sequence[MediaItem]) -> bool:
        """Extend the leases of a request; return whether one of its images is gone."""
        ids = list(dict.fromkeys(item.id for item in media))
        return len(await self._hold(key, ids)) < len(ids)

    async def put_again(self, key: str, tokens: Tokens) -> None:
        """Store the images of a request anew. Raises RequestError: images_full."""
        await self._put(key, tokens.pixels)

    async def release(self, key: str) -> None:
        """End the leases of a request that is answered."""
        if (ids := self.held.pop(key, None)) is not None:
            await self._store.release(ids, key)

    def forget(self, keys: Collection[str]) -> None:
        """Leave the leases of these requests to another lane."""
        for key in keys:
            self.held.pop(key, None)

    async def renew(self) -> None:
        """Extend all leases."""
        for key, ids in list(self.held.items()):
            if key in self.held:
                await self._store.hold(ids, key, self._for_s)

    async def _hold(self, key: str, ids: list[str]) -> dict[str, tuple[int, int]]:
        try:
            sizes = await self._store.hold(ids, key, self._for_s)
        except BusError as error:
            raise _refusal(error) from None
        found = {id: size for id, size in zip(ids, sizes, strict=True) if size is not None}
        self._note(key, found)
        return found

    async def _put(self, key: str, images: Sequence[StoredImage]) -> None:
        more = {"holder": key, "for_s": self._for_s, "max_bytes": self._max_bytes}
        for image in images:
            try:
                stored = await self._store.put(image.id, image, **more)  # type: ignore[arg-type]
            except BusError as error:
                raise _refusal(error) from None
            if not stored:
                raise _full(self._max_bytes)
            self._note(key, [image.id])

    def _note(self, key: str, ids: Collection[str]) -> None:
        if ids:
            self.held[key] = self.held.get(key, frozenset()).union(ids)


def _full(max_bytes: int) -> RequestError:
    error = RequestError(
        f"images of requests in flight fill the store of {max_bytes} bytes (images.store_bytes); "
        f"try again in {FULL_RETRY_S:g} s",
        code="images_full",
    )
    error.retry_after_s = FULL_RETRY_S
    return error


def _refusal(error: BusError) -> RequestError:
    """Return the refusal of a request whose images the store refuses.

    Raises:
        ChannelClosed: The bus was closed.
    """
    if isinstance(error, ChannelClosed):
        raise error
    return RequestError(f"the request's images can't be stored: {error.message}", code=error.code)

"""Images of requests in the store: held while their requests are in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...bus.entries import RequestEntry
from ...bus.media import MediaItem
from ...bus.public import GenerateRequest
from ...config import BusError, ChannelClosed, ImagesConfig, RequestError
from ...media.decoder import refusal
from ...store.images import FOR_EVER, ImageStore, StoredImage
from ...text.image_tokens import Size
from .arrivals import PromptImage
from .parts.images import Images

if TYPE_CHECKING:
    from ...media.turns import FairDecoder
    from .core import AdmissionCore

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
        held: Names of images by the key of each entry that has or had some.
    """

    def __init__(self, store: ImageStore, config: ImagesConfig, *, durable: bool) -> None:
        self._store, self._max_bytes = store, config.store_bytes
        self._for_s = LEASE_S if durable else FOR_EVER
        self.held: dict[str, frozenset[str]] = {}
        # Tenant and bytes of each entry whose images were counted.
        self._counted: dict[str, tuple[str, int]] = {}

    async def load(
        self, entry: RequestEntry, core: AdmissionCore, decoder: FairDecoder
    ) -> tuple[PromptImage, ...]:
        """Decode, store and hold the images of a request that `core` has checked.

        Their sizes are read and counted against all limits before one is decoded.

        Raises:
            RequestError: unknown_image, invalid_image, image_too_large, image_decode_failed,
                prompt_too_long, images_full; or the store can't be used.
        """
        request = entry.request
        assert isinstance(request, GenerateRequest)
        self._note(entry.key, ())
        tenant, alone = request.tenant, len(request.images) == 1
        images = core.part(Images)
        name = partial(images.name, tenant=core.sharing_tenant(request), alone=alone)
        ids = dict.fromkeys(image.id for image in request.images if image.id)
        stored = await self._hold(entry.key, [name(id) for id in ids])
        sizes: list[Size] = []
        for place, image in enumerate(request.images):
            where = f"images[{place}]"
            if image.data:
                sizes.append(await decoder.size(image.data, where, tenant))
            elif name(image.id) in stored:
                sizes.append(stored[name(image.id)])
            else:
                reason = "no image of this id is stored for this tenant; send its file as data"
                raise refusal("unknown_image", where, reason)
        num_tokens = await decoder.run(tenant, partial(images.check_tokens, sizes))
        self._count(entry.key, tenant, images.num_bytes(num_tokens))
        found: list[PromptImage] = []
        decoded: dict[bytes, PromptImage] = {}
        for place, (image, size) in enumerate(zip(request.images, sizes, strict=True)):
            where = f"images[{place}]"
            if not image.data:
                found.append(PromptImage(image.id, size, name(image.id)))
                continue
            if image.data not in decoded:
                made = await decoder.decode(image.data, where, tenant, alone=alone)
                if (made.width, made.height) != size:
                    raise refusal(
                        "invalid_image", where, "its header gives another size; save it anew"
                    )
                decoded[image.data] = PromptImage(made.id, size, name(made.id))
                kept = StoredImage(*size, made.data)
                await self._put(entry.key, decoded[image.data].name, kept)
            found.append(decoded[image.data])
        return tuple(found)

    def _count(self, key: str, tenant: str, num_bytes: int) -> None:
        """Count the images of an entry against its tenant's share.

        Raises:
            RequestError: image_too_large: they exceed the share alone. images_full.
        """
        share = self._max_bytes // 2
        if num_bytes > share:
            raise RequestError(
                f"the request's images take {num_bytes} bytes as the model takes them, and one "
                f"tenant's may take {share}, half of images.store_bytes; send fewer or smaller "
                "ones",
                code="image_too_large",
            )
        self._counted.pop(key, None)
        held = sum(size for owner, size in self._counted.values() if owner == tenant)
        if held + num_bytes > share:
            raise _full(
                f"images of the tenant's requests in flight fill its share of {share} bytes, half "
                "of images.store_bytes"
            )
        self._counted[key] = tenant, num_bytes

    async def missing(self, key: str, media: Sequence[MediaItem]) -> bool:
        """Extend the leases of a request; return whether one of its images is gone."""
        names = list(dict.fromkeys(item.name for item in media))
        return len(await self._hold(key, names)) < len(names)

    async def release(self, key: str) -> None:
        """End the leases of a request that is answered."""
        self._counted.pop(key, None)
        if names := self.held.pop(key, None):
            await self._store.release(names, key)

    def forget(self, keys: Collection[str]) -> None:
        """Leave the leases of these requests to another lane."""
        for key in keys:
            self.held.pop(key, None)
            self._counted.pop(key, None)

    async def renew(self) -> None:
        """Extend all leases."""
        for key, names in list(self.held.items()):
            if names and key in self.held:
                await self._store.hold(names, key, self._for_s)

    async def _hold(self, key: str, names: list[str]) -> dict[str, Size]:
        if not names:
            return {}
        try:
            sizes = await self._store.hold(names, key, self._for_s)
        except BusError as error:
            raise _refusal(error) from None
        found = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
        self._note(key, found)
        return found

    async def _put(self, key: str, name: str, image: StoredImage) -> None:
        more = {"holder": key, "for_s": self._for_s, "max_bytes": self._max_bytes}
        try:
            stored = await self._store.put(name, image, **more)  # type: ignore[arg-type]
        except BusError as error:
            raise _refusal(error) from None
        if not stored:
            raise _full(
                f"images of requests in flight fill the store of {self._max_bytes} bytes "
                "(images.store_bytes)"
            )
        self._note(key, [name])

    def _note(self, key: str, names: Collection[str]) -> None:
        self.held[key] = self.held.get(key, frozenset()).union(names)


def _full(reason: str) -> RequestError:
    remedy = f"try again in {FULL_RETRY_S:g} s"
    return RequestError(reason, remedy=remedy, code="images_full", retry_after_s=FULL_RETRY_S)


def _refusal(error: BusError) -> RequestError:
    """Return the refusal of a request whose images the store refuses.

    Raises:
        ChannelClosed: The bus was closed.
    """
    if isinstance(error, ChannelClosed):
        raise error
    return RequestError(f"the request's images can't be stored: {error.message}", code=error.code)

"""Contents of files: on the records of a bus, in a folder, or in an object store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Collection
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from ..config import BusError, ConfigError, shown
from ..config.logger import get_logger
from .records import Command, Records
from .redis.keys import Keys

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK_BYTES = 256 << 10
"""Bytes of a field of a blob on records."""

UNFINISHED_S = 3600
"""Seconds after which a blob that is not whole is deleted, from its last chunk on."""

_SIZE = b"size"


class BlobStore(Protocol):
    """Byte strings under names, each written once and whole.

    Names are of letters, digits, `-`, `_` and `/`. Methods raise BusError when the store can't be
    reached or is full (`storage_failed`).
    """

    async def write(self, name: str, parts: AsyncIterable[bytes], ttl_s: int) -> int:
        """Write a blob; return its bytes. It can be read once it is whole, and a write that ends
        early leaves nothing.

        Args:
            name: A name that was never written.
            parts: Its contents. What they raise ends the write.
            ttl_s: Seconds after which it may be deleted.
        """

    async def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, fewer at its end.

        Raises:
            KeyError: There is no such blob.
        """

    async def delete(self, names: Collection[str]) -> None:
        """Delete blobs; unknown names are ignored."""


class RecordBlobs:
    """Blobs as hashes of chunks, in memory or on Redis."""

    def __init__(self, keys: Keys, records: Records) -> None:
        self._keys, self._records = keys, records

    async def write(self, name: str, parts: AsyncIterable[bytes], ttl_s: int) -> int:
        key, size = self._keys.blob(name), 0
        try:
            async for chunk in rechunked(parts, CHUNK_BYTES):
                await self._records.run_all(
                    [
                        ("HSET", key, size // CHUNK_BYTES, chunk),
                        ("EXPIRE", key, UNFINISHED_S),
                    ]
                )
                size += len(chunk)
            await self._records.run_all([("HSET", key, _SIZE, size), ("EXPIRE", key, ttl_s)])
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(BusError):
                await self._records.run("DEL", key)
            raise
        return size

    async def read(self, name: str, start: int, stop: int) -> bytes:
        key = self._keys.blob(name)
        chunks = range(start // CHUNK_BYTES, -(-max(stop, start) // CHUNK_BYTES))
        size, *found = await self._records.run("HMGET", key, _SIZE, *chunks)
        if size is None:
            raise KeyError(name)
        return b"".join(filter(None, found))[start % CHUNK_BYTES :][: max(0, stop - start)]

    async def delete(self, names: Collection[str]) -> None:
        if names:
            commands: list[Command] = [("DEL", self._keys.blob(name)) for name in names]
            await self._records.run_all(commands)


class ObjectBlobs:
    """Blobs as objects of a folder or of an object store. A folder's and a bucket's own rules
    delete what killed gateways have left."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def write(self, name: str, parts: AsyncIterable[bytes], ttl_s: int) -> int:
        size = 0

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal size
            async for chunk in rechunked(parts, CHUNK_BYTES):
                size += len(chunk)
                yield chunk

        async with aclosing(counted()) as chunks:
            await self._run(self._store.put_async(name, chunks))
        return size

    async def read(self, name: str, start: int, stop: int) -> bytes:
        from obstore.exceptions import GenericError, NotFoundError

        if stop <= start:
            return b""
        try:
            return bytes(await self._store.get_range_async(name, start=start, end=stop))
        except (NotFoundError, FileNotFoundError):
            raise KeyError(name) from None
        except (GenericError, OSError, ValueError) as error:
            raise _failed(error) from None

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                await self._run(self._store.delete_async(name))

    async def _run(self, work: Any) -> None:
        from obstore.exceptions import BaseError

        try:
            await work
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise _failed(error) from None


def blobs_at(storage: str, of_bus: RecordBlobs) -> BlobStore:
    """Return the store that `batches.storage` names.

    Raises:
        ConfigError: It is no folder or URL of an object store, or its library is not installed.
    """
    if not storage:
        return of_bus
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ConfigError(
            f"batches.storage is {shown(storage)}, which needs the package obstore; install "
            "nano-inference[batch], or leave the setting empty to keep files on the bus"
        ) from None
    try:
        if "://" in storage:
            return ObjectBlobs(from_url(storage))
        return ObjectBlobs(LocalStore(Path(storage).expanduser(), mkdir=True))
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            f"batches.storage is {shown(storage)}, which can't be opened: {error}; it must be a "
            "folder, or a URL such as s3://bucket/prefix"
        ) from None


async def rechunked(parts: AsyncIterable[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the same bytes in chunks of `size`, the last one shorter."""
    buffer = bytearray()
    async for part in parts:
        buffer += part
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
    if buffer:
        yield bytes(buffer)


def _failed(error: Exception) -> BusError:
    get_logger().warning("storage_failed", error=str(error))
    return BusError(
        "the storage of files (batches.storage) can't be reached or is full; nothing was stored. "
        "Send it again, or ask the operator, whose log has the cause",
        code="storage_failed",
    )

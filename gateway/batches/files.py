"""Files of tenants: written whole or not at all, read by ranges, deleted with their contents."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from msgspec.structs import replace

from ...config import BatchesConfig, BusError, RequestError, shown
from ...store.blobs import UNFINISHED_S, BlobStore
from ...store.files import FileRecord, FileStore, Piece
from ..server.http import EngineError

READ_BYTES = 1 << 20
"""Bytes that are read at once."""

# Contents outlive their record, so that a read that has begun ends.
_GRACE_S = 3600

# A batch of messages keeps its file so long, whatever the setting.
_LEAST_TTL_S = 86_400

_MOST_PURGED = 256


class About(NamedTuple):
    """A file's name, its purpose, and seconds after which it is deleted; None for
    `batches.files_ttl_s`."""

    filename: str = ""
    purpose: str = ""
    ttl_s: int | None = None


@dataclass(eq=False)
class Files:
    """The files of all tenants.

    Methods raise BusError when the bus or the storage can't be reached.
    """

    records: FileStore
    blobs: BlobStore
    config: BatchesConfig

    async def write(
        self,
        tenant: str,
        parts: AsyncIterable[bytes],
        about: Callable[[], About],
        most: int | None = None,
    ) -> FileRecord:
        """Write a file.

        Args:
            tenant: The tenant whose file it is.
            parts: Its contents. What they raise ends the write, which then leaves nothing.
            about: Returns the rest, once the contents have ended. What it raises does the same.
            most: The most bytes that it may have; None for the limit of a file.

        Raises:
            RequestError: files_full, request_too_large.
        """
        most = min(self.config.max_file_bytes if most is None else most, self.config.max_file_bytes)
        record = await self.reserve(tenant, most)
        written = False
        try:
            size = await self.write_blob(record.id, limited(parts, most))
            written = True
            return await self._put(record, about(), (Piece(record.id, size),))
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(BusError):
                await self.records.remove(tenant, [record.id])
                if written:
                    await self.blobs.delete([record.id])
            raise

    async def reserve(self, tenant: str, most: int, about: About | None = None) -> FileRecord:
        """Record a file that is not whole. Raises RequestError: files_full."""
        now_s, about = int(time.time()), about or About()
        ttl_s = self._ttl_s(about)
        record = FileRecord(
            id=f"file-{uuid.uuid4().hex}",
            tenant=tenant,
            filename=about.filename,
            purpose=about.purpose,
            num_bytes=most,
            created_s=now_s,
            expires_s=now_s + max(ttl_s, UNFINISHED_S),
            ready=False,
        )
        await self.records.reserve(record, self.config.max_tenant_bytes)
        return record

    async def write_blob(self, name: str, parts: AsyncIterable[bytes]) -> int:
        """Write a piece of a file; return its bytes."""
        ttl_s = max(self.config.files_ttl_s, _LEAST_TTL_S) + _GRACE_S
        return await self.blobs.write(name, parts, ttl_s)

    async def _put(self, record: FileRecord, about: About, pieces: tuple[Piece, ...]) -> FileRecord:
        """Record that a file is whole."""
        whole = replace(
            record,
            filename=about.filename,
            purpose=about.purpose,
            num_bytes=sum(piece.num_bytes for piece in pieces),
            ready=True,
            expires_s=record.created_s + self._ttl_s(about),
            pieces=pieces,
        )
        await self.records.put(whole)
        return whole

    def _ttl_s(self, about: About) -> int:
        return self.config.files_ttl_s if about.ttl_s is None else about.ttl_s

    async def find(self, tenant: str, file_id: str) -> FileRecord:
        """Return a whole file. Raises RequestError: unknown_file."""
        record = await self.records.find(tenant, file_id)
        if record is None or not record.ready:
            raise unknown_file(file_id)
        return record

    async def read(self, record: FileRecord, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`. Raises RequestError: unknown_file."""
        found, at = [], 0
        for piece in record.pieces:
            first, last = max(start, at), min(stop, at + piece.num_bytes)
            if first < last:
                try:
                    found.append(await self.blobs.read(piece.blob, first - at, last - at))
                except KeyError:
                    raise unknown_file(record.id) from None
            at += piece.num_bytes
        return b"".join(found)

    async def content(
        self, record: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the contents, or those from `start` to `stop`."""
        end = record.num_bytes if stop is None else stop
        for at in range(start, end, READ_BYTES):
            yield await self.read(record, at, min(at + READ_BYTES, end))

    async def delete(self, record: FileRecord) -> None:
        """Delete a file. Raises RequestError (unknown_file) if another call has deleted it."""
        if not await self.records.remove(record.tenant, [record.id]):
            raise unknown_file(record.id)
        await self.blobs.delete([piece.blob for piece in record.pieces])

    async def purge(self) -> None:
        """Delete expired files, and what is left of uploads that were cut off."""
        for record in await self.records.expired(_MOST_PURGED):
            if await self.records.remove(record.tenant, [record.id]):
                await self.blobs.delete([piece.blob for piece in record.pieces] or [record.id])


async def limited(
    parts: AsyncIterable[bytes],
    most: int,
    what: str = "the file",
    limit: str = "batches.max_file_bytes",
) -> AsyncIterator[bytes]:
    """Yield the parts. Raises RequestError (request_too_large) when they exceed `most` bytes.

    Args:
        what: The noun for them all, for the error.
        limit: The name of the limit, likewise.
    """
    size = 0
    async for part in parts:
        size += len(part)
        if size > most:
            raise RequestError(
                f"{what} has more than {most} bytes, which is the most ({limit})",
                "split it",
                code="request_too_large",
            )
        yield part


def unknown_file(file_id: str) -> EngineError:
    """There is no such file, or it is another tenant's."""
    return EngineError(
        f"there is no file {shown(file_id)} here: it was never uploaded whole, was deleted, has "
        "expired, or is another tenant's (X-Tenant)",
        remedy="list your files, or send it again",
        code="unknown_file",
    )

"""Files of tenants: written whole or not at all, read by ranges, deleted with their contents."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

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
        *,
        filename: str,
        purpose: str,
        most: int | None = None,
        ttl_s: int | None = None,
    ) -> FileRecord:
        """Write a file.

        Args:
            tenant: The tenant whose file it is.
            parts: Its contents. What they raise ends the write, which then leaves nothing.
            filename: Its name.
            purpose: As of `FileRecord`.
            most: The most bytes that it may have; None for the limit of a file.
            ttl_s: Seconds after which it is deleted; None for `batches.files_ttl_s`.

        Raises:
            RequestError: files_full, request_too_large.
        """
        most = min(self.config.max_file_bytes if most is None else most, self.config.max_file_bytes)
        ttl_s = self.config.files_ttl_s if ttl_s is None else ttl_s
        await self.purge(tenant)
        now_s = int(time.time())
        file_id = f"file-{uuid.uuid4().hex}"
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=most,
            created_s=now_s,
            expires_s=now_s + max(ttl_s, UNFINISHED_S),
            ready=False,
            pieces=(Piece(file_id, most),),
        )
        await self.records.reserve(record, self.config.max_tenant_bytes)
        try:
            size = await self.blobs.write(file_id, _limited(parts, most), ttl_s + _GRACE_S)
            whole = replace(
                record,
                num_bytes=size,
                ready=True,
                expires_s=now_s + ttl_s,
                pieces=(Piece(file_id, size),),
            )
            await self.records.put(whole)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(BusError):
                await self.records.remove(tenant, [file_id])
            raise
        return whole

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

    async def content(self, record: FileRecord) -> AsyncIterator[bytes]:
        """Yield the contents."""
        for start in range(0, record.num_bytes, READ_BYTES):
            yield await self.read(record, start, min(start + READ_BYTES, record.num_bytes))

    async def delete(self, record: FileRecord) -> None:
        """Delete a file. Raises RequestError (unknown_file) if another call has deleted it."""
        if not await self.records.remove(record.tenant, [record.id]):
            raise unknown_file(record.id)
        await self.blobs.delete([piece.blob for piece in record.pieces])

    async def purge(self, tenant: str) -> None:
        """Delete a tenant's expired files, and what is left of uploads that were cut off."""
        for record in await self.records.expired(tenant):
            if await self.records.remove(tenant, [record.id]):
                await self.blobs.delete([piece.blob for piece in record.pieces])


async def _limited(parts: AsyncIterable[bytes], most: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in parts:
        size += len(part)
        if size > most:
            raise RequestError(
                f"the file has more than {most} bytes",
                "which is the most that a file may have (batches.max_file_bytes)",
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

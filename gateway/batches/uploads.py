"""Uploads: files that come in parts, each of which may be sent again."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
from msgspec.structs import replace

from ...config import BusError, RequestError, field_error, shown
from ...store.files import FileRecord, Piece
from ..server.http import EngineError
from .files import About, Files, limited

MOST_PART_BYTES = 64 << 20
"""As OpenAI has it."""

MOST_PARTS = 1024
"""Parts of an upload."""


@dataclass(eq=False)
class Uploads:
    """The uploads of all tenants.

    Until it is complete, an upload is a file that is not whole, whose pieces are its parts; those
    with bytes are whole.
    """

    files: Files

    async def begin(self, tenant: str, about: About, num_bytes: int) -> FileRecord:
        """Reserve the room of an upload. Raises RequestError: files_full, request_too_large."""
        most = self.files.config.max_file_bytes
        if num_bytes > most:
            raise RequestError(
                f"bytes is {num_bytes}, and a file may have {most} (batches.max_file_bytes)",
                "split it",
                code="request_too_large",
            )
        return await self.files.reserve(tenant, num_bytes, about)

    async def find(self, tenant: str, upload_id: str) -> FileRecord:
        """Return an upload that is not complete. Raises RequestError: unknown_file."""
        record = await self.files.records.find(tenant, file_id_of(upload_id))
        if record is None or record.ready or not record.purpose:
            raise EngineError(
                f"there is no open upload {shown(upload_id)} here: it is complete, was cancelled, "
                "is older than an hour, or is another tenant's (X-Tenant)",
                remedy="begin another one",
                code="unknown_file",
            )
        return record

    async def add(self, tenant: str, upload_id: str, content: AsyncIterable[bytes]) -> str:
        """Write a part; return its id. What its contents raise leaves nothing.

        Raises:
            RequestError: unknown_file, request_too_large, invalid_request.
        """
        part, most = f"part_{uuid.uuid4().hex}", MOST_PART_BYTES
        # Noted first, so that the part of a killed gateway is deleted with the upload.
        record = await self._change(tenant, upload_id, Piece(part, 0))
        try:
            if len(record.pieces) > MOST_PARTS:
                why = f"is one of more than {MOST_PARTS} parts"
                raise field_error("data", why, remedy="send larger parts")
            parts = limited(content, min(most, record.num_bytes), "the part", "bytes of the upload")
            size = await self.files.write_blob(part, parts)
            if not size:
                raise field_error("data", "is empty", remedy="send the part's bytes")
            await self._change(tenant, upload_id, Piece(part, size))
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(BusError):
                await self.files.blobs.delete([part])
                with suppress(RequestError):
                    await self._change(tenant, upload_id, Piece(part, -1))
            raise
        return part

    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str
    ) -> FileRecord:
        """Make a file of an upload's parts in this order; parts that are not named are deleted.

        Raises:
            RequestError: unknown_file, invalid_request.
        """
        record = await self.find(tenant, upload_id)
        sizes = {piece.blob: piece.num_bytes for piece in record.pieces if piece.num_bytes > 0}
        if wrong := [each for each in part_ids if each not in sizes]:
            raise field_error("part_ids", f"has {shown(wrong[0])}", "each must be a whole part")
        if len({*part_ids}) < len(part_ids):
            raise field_error("part_ids", "has a part twice", remedy="name each once")
        pieces = tuple(Piece(each, sizes[each]) for each in part_ids)
        if (size := sum(piece.num_bytes for piece in pieces)) != record.num_bytes:
            why = f"has {size} bytes, and the upload was to have {record.num_bytes}"
            raise field_error("part_ids", why, remedy="name all of its parts")
        whole = replace(record, pieces=pieces, ready=True)
        if md5:
            digest = hashlib.md5(usedforsecurity=False)
            async for content in self.files.content(whole):
                digest.update(content)
            if digest.hexdigest() != md5.lower():
                why = f"is {shown(md5)}, and the parts have another one"
                raise field_error("md5", why, remedy="send the parts again")
        if not await self.files.records.change(record, whole):
            raise field_error("part_ids", "was read while a part came", remedy="send it again")
        await self.files.blobs.delete([each for each in sizes if each not in part_ids])
        return whole

    async def cancel(self, tenant: str, upload_id: str) -> FileRecord:
        """Delete an upload that is not complete. Raises RequestError: unknown_file."""
        record = await self.find(tenant, upload_id)
        await self.files.delete(record)
        return record

    async def _change(self, tenant: str, upload_id: str, piece: Piece) -> FileRecord:
        """Add a part or its size to an upload; a size below 0 removes the part."""
        while True:
            record = await self.find(tenant, upload_id)
            kept = tuple(each for each in record.pieces if each.blob != piece.blob)
            changed = replace(record, pieces=kept if piece.num_bytes < 0 else (*kept, piece))
            if await self.files.records.change(record, changed):
                return changed


def file_id_of(upload_id: str) -> str:
    """Return the id of the file that an upload becomes."""
    return f"file-{upload_id.removeprefix('upload_')}"


def upload_id_of(record: FileRecord) -> str:
    """Return the id of the upload that becomes a file."""
    return f"upload_{record.id.removeprefix('file-')}"

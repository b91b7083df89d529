"""Files of tenants: their records on the bus, and their contents in a `BlobStore`."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from ..config import RequestError
from .blobs import UNFINISHED_S
from .records import Command, Records, readable
from .redis.keys import Keys

FILE_BYTES = 1024
"""Bytes that a file counts besides its contents."""

MOST_FILES = 10_000
"""Files of a tenant, all of which are read for a list."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A blob that is a piece of a file, and its bytes."""

    blob: str
    num_bytes: int


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file.

    Attributes:
        id: Its id, unique over all tenants.
        tenant: The tenant whose file it is.
        filename: The name that its client gave it.
        purpose: As OpenAI's interface has it, such as "batch" or "batch_output".
        num_bytes: Its size; while it is written, the most that it may become.
        created_s: Seconds since the Unix epoch.
        expires_s: When it is deleted, likewise.
        ready: Whether it is whole. One that is not is an upload in progress.
        pieces: Its contents, in order.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int
    ready: bool = True
    pieces: tuple[Piece, ...] = ()


_decode = msgspec.json.Decoder(FileRecord).decode


class FilesFull(RequestError):
    """A tenant's files use `batches.max_tenant_bytes`."""

    code = "files_full"


class FileStore:
    """Records of files by tenant and id.

    Methods raise BusError when the transport can't be reached; a write may have happened
    nevertheless.
    """

    def __init__(self, keys: Keys, records: Records) -> None:
        self._keys, self._records = keys, records

    async def reserve(self, record: FileRecord, max_bytes: int) -> None:
        """Record a file before it is written, if the tenant has room for it.

        Args:
            record: It is not `ready`, and its `num_bytes` the most that it may become.
            max_bytes: Limit on the bytes of the tenant's files.

        Raises:
            FilesFull: There is no room. Of uploads that come at once each may be refused.
        """
        key = self._keys.files(record.tenant)
        # Written before the sum is read, so that uploads at once don't exceed the limit together.
        own: Command = ("HSET", key, record.id, msgspec.json.encode(record))
        _, found = await self._records.run_all([own, ("HGETALL", key)])
        live = _live(found)
        if len(live) > MOST_FILES:
            full = f"you have {MOST_FILES} files, which is the most"
        elif sum(each.num_bytes + FILE_BYTES for each in live) > max_bytes:
            full = (
                f"{record.num_bytes} bytes more would exceed the limit of {max_bytes} bytes for "
                "your files (batches.max_tenant_bytes)"
            )
        else:
            await self._expires(record, record.created_s + UNFINISHED_S)
            return
        await self._records.run("HDEL", key, record.id)
        raise FilesFull(f"{full}; delete files that you no longer need")

    async def put(self, record: FileRecord) -> None:
        """Write a file's record in place of what there is. It needs no room but what `reserve` has
        found."""
        key = self._keys.files(record.tenant)
        await self._records.run("HSET", key, record.id, msgspec.json.encode(record))
        await self._expires(record, record.expires_s)

    async def change(self, known: FileRecord, record: FileRecord) -> bool:
        """Replace a file's record if it is still the known one; return whether it was.

        Other writes to the tenant's files at the same moment count as a change.
        """
        key, field = self._keys.files(record.tenant), record.id.encode()
        raw = msgspec.json.encode(record)
        if not await self._records.replace(key, field, msgspec.json.encode(known), {field: raw}):
            return False
        if record.ready:
            await self._expires(record, record.expires_s)
        return True

    async def find(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a file; None if the tenant has none with this id, or it has expired."""
        raw = await self._records.run("HGET", self._keys.files(tenant), file_id)
        return next(iter(_live({file_id.encode(): raw})), None) if raw is not None else None

    async def listed(self, tenant: str) -> list[FileRecord]:
        """Return the tenant's files, the newest first."""
        found = await self._records.run("HGETALL", self._keys.files(tenant))
        return sorted(_live(found), key=lambda each: (each.created_s, each.id), reverse=True)

    async def expired(self, most: int) -> list[FileRecord]:
        """Return files of all tenants whose time has passed, and uploads that nobody finished."""
        over = await self._records.run(
            "ZRANGE",
            self._keys.file_expiries,
            "-inf",
            int(time.time()),
            "BYSCORE",
            "LIMIT",
            0,
            most,
        )
        places = [each.decode().split(" ", 1) for each in over]
        commands: list[Command] = [
            ("HGET", self._keys.files(tenant), file_id) for file_id, tenant in places
        ]
        expired, gone = [], []
        for member, raw in zip(over, await self._records.run_all(commands), strict=True):
            record = None if raw is None else readable(_decode, raw, "files")
            if record is None:
                gone.append(member)
            elif _is_live(record):
                await self._expires(record, record.expires_s)
            else:
                expired.append(record)
        if gone:
            await self._records.run("ZREM", self._keys.file_expiries, *gone)
        return expired

    async def _expires(self, record: FileRecord, at_s: int) -> None:
        """Let `expired` look at a file at this time."""
        member = f"{record.id} {record.tenant}"
        await self._records.run("ZADD", self._keys.file_expiries, "GT", at_s, member)

    async def remove(self, tenant: str, file_ids: Collection[str]) -> int:
        """Delete records, whose contents nobody can read from then on; return their number."""
        key = self._keys.files(tenant)
        return int(await self._records.run("HDEL", key, *file_ids)) if file_ids else 0


def _decoded(found: dict[bytes, bytes]) -> list[FileRecord]:
    records = (readable(_decode, raw, "files") for raw in found.values())
    return [each for each in records if each is not None]


def _live(found: dict[bytes, bytes]) -> list[FileRecord]:
    return [each for each in _decoded(found) if _is_live(each)]


def _is_live(record: FileRecord) -> bool:
    now_s = time.time()
    return record.expires_s > now_s and (record.ready or record.created_s + UNFINISHED_S > now_s)

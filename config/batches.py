"""Settings of files and batches."""

from __future__ import annotations

from typing import Annotated, ClassVar

from .base import PositiveInt, Range, Section


class BatchesConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Files and batches of the gateway. docs/batches.md.

    Attributes:
        storage: Where the contents of files are: "" for the bus, in memory or on its Redis server;
            else a folder that all gateways share, or a URL such as `s3://bucket/prefix`
            (credentials as the object store's own environment variables have them).
        max_file_bytes: Size limit of a file.
        max_tenant_bytes: Limit on the bytes of all files of a tenant, results of batches included.
        max_lines: Limit on the lines of a batch.
        max_open: Limit on the unfinished batches of a tenant.
        files_ttl_s: Seconds after which a file is deleted, unless its upload says otherwise.
        segment_lines: Lines that a gateway takes over, and records, together.
        lease_s: Seconds after which another gateway takes over the lines of a killed one.
        max_in_flight: Lines of this gateway in flight at once; 0 runs no batches here.
        max_beside: The same while other calls run here. More lines end at once whenever these calls
            pause, and delay the next one.
    """

    SECTION: ClassVar[str] = "batches"

    storage: str = ""
    max_file_bytes: PositiveInt = 200 << 20
    max_tenant_bytes: PositiveInt = 2 << 30
    max_lines: PositiveInt = 1_000_000
    max_open: PositiveInt = 64
    files_ttl_s: Annotated[int, Range("from 60 to 31536000 (a year)", 60, 31_536_000)] = 30 * 86_400
    segment_lines: Annotated[int, Range("from 1 to 100000", 1, 100_000)] = 500
    lease_s: Annotated[int, Range("from 1 to 3600", 1, 3600)] = 15
    max_in_flight: Annotated[int, Range("from 0 to 4096", 0, 4096)] = 384
    max_beside: Annotated[int, Range("from 1 to 4096", 1, 4096)] = 8

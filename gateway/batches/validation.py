"""The check of a batch's file before its first line runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import anyio.lowlevel
import msgspec

from ...config import BatchesConfig
from ...store.batches import BatchFault

MOST_FAULTS = 32
"""Faults of a file that are listed."""

SEGMENT_BYTES = 8 << 20
"""A segment with so many bytes gets no more lines."""


class Scanned(NamedTuple):
    """The lines of a file.

    Attributes:
        starts: As of `BatchState`.
        total: Their number.
        faults: Why no batch can be made of them.
    """

    starts: tuple[tuple[int, int], ...]
    total: int
    faults: list[BatchFault]


class _Named(msgspec.Struct):
    custom_id: str = ""


async def scan(
    content: AsyncIterator[bytes], config: BatchesConfig, max_line_bytes: int
) -> Scanned:
    """Find the segments of a file. Lines that can't be run don't stop a batch: they become errors.

    Args:
        content: The file.
        config: The limits.
        max_line_bytes: Longest line whose `custom_id` is compared; a longer one can't be run.
    """
    starts, total, at = [(0, 0)], 0, 0
    faults: list[BatchFault] = []
    seen: set[int] = set()
    rest = b""
    async for part in _with_end(content):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line and not line.isspace():
                begin, first = starts[-1]
                if total - first >= config.segment_lines or at - begin >= SEGMENT_BYTES:
                    starts.append((at, total))
                total += 1
                if (name := _name_of(line, max_line_bytes)) and len(faults) < MOST_FAULTS:
                    if name in seen:
                        message = (
                            "its custom_id is also that of an earlier line; give each line an id "
                            "of its own, by which its result is found"
                        )
                        faults.append(
                            BatchFault("duplicate_custom_id", message, total, "custom_id")
                        )
                    seen.add(name)
            at += len(line) + 1
        # Of a line that is too long to be run, the beginning is enough.
        if (excess := len(rest) - max_line_bytes - 1) > 0:
            at, rest = at + excess, rest[: max_line_bytes + 1]
        if total > config.max_lines:
            message = (
                f"the file has more than {config.max_lines} lines, which is the most that a batch "
                "may have (batches.max_lines); split it"
            )
            return Scanned((), total, [BatchFault("too_many_lines", message)])
        await anyio.lowlevel.checkpoint()
    if not total:
        message = "the file has no lines; write one JSON object in each"
        faults.append(BatchFault("empty_file", message))
    return Scanned((*starts, (at, total)), total, faults)


async def _with_end(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the contents, and the end of the last line."""
    async for part in content:
        yield part
    yield b"\n"


def _name_of(line: bytes, max_bytes: int) -> int:
    """Return a hash of a line's id; 0 if it has none that can be read."""
    if len(line) > max_bytes:
        return 0
    try:
        name = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"), type=_Named).custom_id
    except (ValueError, RecursionError):
        return 0
    return hash(name) if name else 0

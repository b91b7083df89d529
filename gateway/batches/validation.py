"""The check of a batch's file before its first line runs."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import NamedTuple

import anyio.lowlevel
import msgspec

from ...config import BatchesConfig
from ...store.batches import BatchFault
from .lines import lines_of

MOST_FAULTS = 32
"""Faults of a file that are listed."""

SEGMENT_BYTES = 4 << 20
"""A segment with so many bytes gets no more lines."""

_LINES_AT_ONCE = 1000
"""Lines after which other tasks run."""


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
    content: AsyncIterable[bytes], config: BatchesConfig, max_line_bytes: int
) -> Scanned:
    """Find the segments of a file. Lines that can't be run don't stop a batch: they become errors.

    Args:
        content: The file.
        config: The limits.
        max_line_bytes: Longest line whose `custom_id` is compared; a longer one can't be run.
    """
    starts, total, stop = [(0, 0)], 0, 0
    faults: list[BatchFault] = []
    seen: set[int] = set()
    async for text in lines_of(content, max_line_bytes):
        begin, first = starts[-1]
        if total - first >= config.segment_lines or text.start - begin >= SEGMENT_BYTES:
            starts.append((text.start, total))
        total, stop = total + 1, text.stop
        if total > config.max_lines:
            message = (
                f"the file has more than {config.max_lines} lines, which is the most that a batch "
                "may have (batches.max_lines); split it"
            )
            return Scanned((), total, [BatchFault("too_many_lines", message)])
        if (name := _name_of(text.content, max_line_bytes)) and len(faults) < MOST_FAULTS:
            if name in seen:
                message = (
                    "its custom_id is also that of an earlier line; give each line an id of its "
                    "own, by which its result is found"
                )
                faults.append(BatchFault("duplicate_custom_id", message, total, "custom_id"))
            seen.add(name)
        if total % _LINES_AT_ONCE == 0:
            await anyio.lowlevel.checkpoint()
    if not total:
        message = "the file has no lines; write one JSON object in each"
        faults.append(BatchFault("empty_file", message))
    return Scanned((*starts, (stop, total)), total, faults)


def _name_of(line: bytes, max_bytes: int) -> int:
    """Return a hash of a line's id; 0 if it has none that can be read."""
    if len(line) > max_bytes:
        return 0
    try:
        name = msgspec.json.decode(line, type=_Named).custom_id
    except (ValueError, RecursionError):
        return 0
    return hash(name) if name else 0

"""Standard input, line by line, without ever holding up the end of the program."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable

_READ_AHEAD = 256
_READ_BYTES = 1 << 16


async def stdin_lines() -> AsyncIterator[bytes]:
    """The lines as they come, without their ends; the last one even if it has none."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    # Bounds the queue on the reader's side, so that what it hands over is never left half done
    # when the loop ends meanwhile.
    room = threading.Semaphore(_READ_AHEAD)

    def put(line: bytes | None) -> None:
        room.acquire()
        loop.call_soon_threadsafe(lines.put_nowait, line)

    # A thread that nobody waits for: a read that blocks on a terminal can't be cancelled, and
    # Ctrl-C must not wait for it. It reads the descriptor itself, since a lock on sys.stdin held
    # at the interpreter's end would be fatal.
    threading.Thread(target=_read_lines, args=(put,), name="stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        room.release()
        yield line


def _read_lines(put: Callable[[bytes | None], None]) -> None:
    rest = b""
    try:
        while chunk := os.read(0, _READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                put(line)
        put(rest)
        put(None)
    except RuntimeError:
        return  # the loop has ended meanwhile, and nobody listens any more

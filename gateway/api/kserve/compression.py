"""Bodies compressed by gzip or deflate (zlib's format), as Triton's clients send them.

A decompressed body has the limits of any body. It is counted piece by piece, so that a small body
that expands a lot is refused before it is in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import anyio

from ....config import RequestError, shown
from ...call import Call

T = TypeVar("T")

CODINGS = {"gzip": 31, "deflate": 15}
"""Content codings, each with zlib's `wbits`."""

LITTLE_BYTES = 1 << 18
"""Up to this size copying and decoding is faster than waking a thread."""

_THREADS = anyio.CapacityLimiter(4)
"""Bodies and tensors processed beside the event loop at a time, piece by piece."""

_PIECE_BYTES = 1 << 20
# Responses are large, and clients wait for them.
_LEVEL = 1


async def run_codec(work: Callable[[], T], *, is_little: bool) -> T:
    """Return the result of work on tensors, done here if it is little, else in a thread."""
    return work() if is_little else await anyio.to_thread.run_sync(work, limiter=_THREADS)


def coding_of(call: Call) -> str:
    """Return the coding of a request's body; "" for none.

    Raises:
        RequestError: unsupported_media_type.
    """
    given = ",".join(call.header_values("content-encoding"))
    named = {each.strip().lower() for each in given.split(",")} - {"", "identity"}
    if not named:
        return ""
    (coding, *more) = named
    if more or coding not in CODINGS:
        raise RequestError(
            f"the Content-Encoding is {shown(given)}; send the body as it is, or compressed once, "
            f"by {' or '.join(CODINGS)}",
            code="unsupported_media_type",
        )
    return coding


def wanted_coding(call: Call) -> str:
    """Return the coding of the response's body; "" for none.

    Only a client that accepts exactly one coding gets it: many libraries list all that they know,
    and compressed tensors take ten times as long.
    """
    given = ",".join(call.header_values("accept-encoding")).strip().lower()
    return given if given in CODINGS else ""


async def decompressed(
    body: bytes, coding: str, max_bytes: int, hold: Callable[[int], None]
) -> bytes:
    """Return a decompressed body.

    Args:
        body: The received body.
        coding: One of `CODINGS`.
        max_bytes: The most bytes of the result.
        hold: Called with each piece's size before the next one is made; its errors end the work.

    Raises:
        RequestError: malformed, request_too_large.
    """
    pieces: list[bytes] = []
    size = 0
    following = _pieces(body, coding)
    while piece := await anyio.to_thread.run_sync(next, following, b"", limiter=_THREADS):
        size += len(piece)
        if size > max_bytes:
            raise RequestError(
                f"the body holds more than {max_bytes} bytes when it is unpacked; send less at a "
                "time",
                code="request_too_large",
            )
        hold(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _pieces(body: bytes, coding: str) -> Iterator[bytes]:
    stream = zlib.decompressobj(CODINGS[coding])
    view = memoryview(body)
    why = ""
    try:
        for begin in range(0, len(view), _PIECE_BYTES):
            rest: bytes | memoryview = view[begin : begin + _PIECE_BYTES]
            more = True
            while more:
                piece = stream.decompress(rest, _PIECE_BYTES)
                if piece:
                    yield piece
                rest = stream.unconsumed_tail
                # After a full piece zlib may hold output for which no input is left.
                more = bool(rest) or len(piece) == _PIECE_BYTES
            if stream.unused_data:
                why = "something follows its end"
                break
    except zlib.error as error:
        why = str(error)
    if why or not stream.eof:
        raise RequestError(
            f"the body can't be unpacked by {coding}: {why or 'it is cut off'}",
            code="malformed",
            remedy="compress it once, or send it as it is",
        )


def compress(parts: Sequence[bytes | memoryview], coding: str) -> bytes:
    """Return a body's parts, joined and compressed. Call it in a thread."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    return b"".join([*map(stream.compress, parts), stream.flush()])

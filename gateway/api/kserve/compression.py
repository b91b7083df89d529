"""Compressed bodies, as Triton's clients offer them: by gzip, or by deflate, which is zlib's.

What is unpacked has the limits of any body, and is counted among all bodies piece by piece, so that
little that becomes much is refused before it is there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import anyio
from starlette.datastructures import Headers

from ....config import RequestError, shown

CODINGS = {"gzip": 31, "deflate": 15}
"""Each with what zlib calls its window and its frame."""

# Unpacked and counted at a time, and taken for it.
_PIECE_BYTES = 1 << 20
# Answers are large, and their clients wait.
_LEVEL = 1


def coding_of(headers: Headers) -> str:
    """What a body is compressed by; "" when it is not.

    Raises:
        RequestError: unsupported_media_type.
    """
    given = ",".join(headers.getlist("content-encoding"))
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


def wanted_coding(headers: Headers) -> str:
    """What the answer is to be compressed by; "" when it is not to be.

    Who wants that names one coding. Many libraries name all that they know without being asked, and
    tensors that come compressed take ten times as long.
    """
    named = [
        each.strip().lower() for each in ",".join(headers.getlist("accept-encoding")).split(",")
    ]
    return named[0] if len(named) == 1 and named[0] in CODINGS else ""


async def unpacked(body: bytes, coding: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """A compressed body as it was before.

    Args:
        body: What has come.
        coding: One of `CODINGS`.
        max_bytes: The most that it may hold.
        hold: Told of so many bytes more, before the next ones are made; what it raises ends it.

    Raises:
        RequestError: malformed, request_too_large.
    """
    pieces: list[bytes] = []
    size = 0
    unpacking = _pieces(body, coding)
    while piece := await anyio.to_thread.run_sync(next, unpacking, b""):
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
    unpacking = zlib.decompressobj(CODINGS[coding])
    view = memoryview(body)
    try:
        for begin in range(0, len(view), _PIECE_BYTES):
            left: bytes | memoryview = view[begin : begin + _PIECE_BYTES]
            more = True
            while more:
                piece = unpacking.decompress(left, _PIECE_BYTES)
                if piece:
                    yield piece
                left = unpacking.unconsumed_tail
                # Of a full piece some may be left in there that no input stands for any more.
                more = bool(left) or len(piece) == _PIECE_BYTES
            if unpacking.unused_data:
                raise _malformed(coding, "something follows its end")
    except zlib.error as error:
        raise _malformed(coding, str(error)) from None
    if not unpacking.eof:
        raise _malformed(coding, "it is cut off")


def _malformed(coding: str, why: str) -> RequestError:
    return RequestError(f"the body can't be unpacked by {coding}: {why}", code="malformed")


def packed(parts: Sequence[bytes | memoryview], coding: str) -> bytes:
    """A body's parts as one that is compressed, by one of `CODINGS`. To be called in a thread."""
    packing = zlib.compressobj(_LEVEL, zlib.DEFLATED, CODINGS[coding])
    return b"".join([*map(packing.compress, parts), packing.flush()])

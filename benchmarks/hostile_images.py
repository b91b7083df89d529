"""Attacks of hostile.py by images: small files that take much time or memory."""

from __future__ import annotations

import asyncio
import io
import struct
import time
import zlib

from hostile_attacker import LIMIT_S, Attacker
from hostile_rig import WORST_S, image_chat, small_image
from PIL import Image

_SCANS = 1000
_LARGE = 8000, 5000
"""Pixels of the largest images that are taken."""


async def growing_images(attacker: Attacker) -> None:
    """PNGs of 100 bytes that a processor scales up to megapixels: refused, or made beside steps."""
    files = [_png(1, height) for height in (16_384, 1024, 340)]
    await asyncio.gather(*(_ask(attacker, [file]) for file in files * 8))


async def slow_counts(attacker: Attacker) -> None:
    """60 JPEGs of 1,000 scans, whose tokens are to be counted."""
    body = image_chat([_slow_jpeg()], counts=True)
    path = "/v1/messages/count_tokens"
    await asyncio.gather(*(attacker.call(path, body) for _ in range(60)))


async def large_images(attacker: Attacker) -> None:
    """Eight PNGs of 40 megapixels and one colour in one call."""
    await _ask(attacker, [_large_png(number) for number in range(8)])


async def many_large_images(attacker: Attacker) -> None:
    """31 of them, 3.7 MB together."""
    await _ask(attacker, [_large_png(number) for number in range(31)])


# The last one, since it ends decode processes: to start them anew would count as another's memory.
async def slow_images(attacker: Attacker) -> None:
    """24 of these JPEGs in chats, beside an image and a text of other tenants."""
    slow = [asyncio.create_task(_ask(attacker, [_slow_jpeg()])) for _ in range(24)]
    await asyncio.sleep(2.0)
    text = {"text": "98 + 25 = " * 150, "sampling_params": {"max_new_tokens": 1}}
    image = image_chat([small_image(7)])
    for name, path, body in (
        ("another tenant's image", "/v1/chat/completions", image),
        ("another tenant's text", "/generate", text),
    ):
        start = time.monotonic()
        headers = {"X-Tenant": f"other {name.split()[-1]}"}
        answer = await attacker.call(path, body, name=name, headers=headers)
        took_s = time.monotonic() - start
        attacker.told[f"{name} took {took_s:.2f} s"] += 1
        if took_s > WORST_S or answer is None or answer.status_code != 200:
            attacker.broken.append(f"{name} waits {took_s:.1f} s")
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def _ask(attacker: Attacker, files: list[bytes]) -> None:
    await attacker.call("/v1/chat/completions", image_chat(files), limit_s=LIMIT_S)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, comment: bytes = b"", rows: bytes | None = None) -> bytes:
    """Return a black PNG in RGB. `rows`: compressed; made if None."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = rows or zlib.compress(bytes((3 * width + 1) * height), 9)
    chunks = ((b"IHDR", header), (b"tEXt", b"a\0" + comment), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


_ROWS: list[bytes] = []


def _large_png(number: int) -> bytes:
    if not _ROWS:
        width, height = _LARGE
        _ROWS.append(zlib.compress(bytes((3 * width + 1) * height), 9))
    return _png(*_LARGE, b"%d" % number, _ROWS[0])


def _slow_jpeg() -> bytes:
    """Return a progressive JPEG of 16 megapixels whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * _SCANS + data[-2:]

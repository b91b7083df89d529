"""Image files of every kind, good and bad."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def picture(width: int = 5, height: int = 3, mode: str = "RGB") -> Image.Image:
    """An image in which no two pixels are equal."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            (x * 40 % 256, y * 70 % 256, (x + 7 * y) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    return image.convert(mode)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file of any size and content."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IEND", b"")))


def webp_of_size(width: int, height: int) -> bytes:
    """A WebP file whose canvas is as large as it says, with a frame of a few pixels."""
    frame = saved(picture(), "WEBP", lossless=True)[12:]
    sizes = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<II", 10, 0) + sizes + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body

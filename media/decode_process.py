"""Decoding of images by Pillow, and the process that does it.

`ImageDecoder` runs this file as a program with the descriptor of a connection. Its first message
configures it (JSON); each other one is an image file. Each answer is JSON: the size, then the
pixels follow in a message of their own; or why the image is refused. An image that takes too much
CPU time ends the process by SIGPROF, even within C code; address space is limited.

The libraries that read images are C code behind hostile input: this process has no other
descriptors, writes no files, and what it returns is checked.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL import WebPImagePlugin as _  # noqa: F401  (the only format that `preinit` leaves out)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats as Pillow names them. A file's content decides, not its name or declared type."""

_SPARE_BYTES = 256 << 20
_BYTES_PER_PIXEL = 24
"""Address space for the largest image: four bytes per pixel as decoded, turned, with transparency,
on a white ground, and three as returned, twice."""

Limits = Mapping[str, int]


class Refused(Exception):
    """An image that can't be used: the error's code, and why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def decode(data: bytes, limits: Limits) -> tuple[int, int, bytes]:
    """Decode an image: the first frame, upright by its EXIF orientation, on white, as RGB.

    Args:
        data: A file's content.
        limits: `max_pixels` and `max_side`, checked before anything is decoded.

    Returns:
        Width, height, and `[height, width, 3]` bytes.

    Raises:
        Refused: invalid_image, image_too_large.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, limits)
            image.load()
            rgb = as_rgb(upright(image))
    except Refused:
        raise
    except UnidentifiedImageError:
        reason = "it is no readable PNG, JPEG, WebP or GIF, whatever its name says; convert it"
        raise Refused("invalid_image", reason) from None
    except MemoryError:
        reason = "decoding it takes more memory than an image of this size needs; save it anew"
        raise Refused("image_too_large", reason) from None
    # Pillow's decoders raise nearly anything for damaged files: OSError, SyntaxError, ValueError,
    # struct.error, IndexError, KeyError, EOFError, zlib.error.
    except Exception as error:  # noqa: BLE001
        reason = f"it is damaged or incomplete ({str(error) or type(error).__name__}); save it anew"
        raise Refused("invalid_image", reason) from None
    return *rgb.size, rgb.tobytes()


def _check_size(width: int, height: int, limits: Limits) -> None:
    most, side = limits["max_pixels"], limits["max_side"]
    if width < 1 or height < 1:
        raise Refused("invalid_image", "it has no pixels; send another one")
    if width * height > most or max(width, height) > side:
        raise Refused(
            "image_too_large",
            f"it has {width} x {height} pixels, and at most {most} pixels (images.max_pixels) with "
            f"sides of {side} (images.max_side) are taken; scale it down",
        )


def upright(image: Image.Image) -> Image.Image:
    """Return the image turned by its EXIF orientation; unchanged if that can't be read."""
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  (as above: Pillow's reader of EXIF raises nearly anything)
        return image


def as_rgb(image: Image.Image) -> Image.Image:
    """Return the image as RGB, transparent parts on white, as Transformers' `convert_to_rgb`."""
    if image.mode.startswith("I"):
        # 16 bits per pixel. Pillow's own conversion cuts all above 255 off.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(ground, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _limit_process(limits: Limits) -> None:
    """Give up what decoding doesn't need."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _SPARE_BYTES
        most += 2 * limits["max_bytes"] + _BYTES_PER_PIXEL * limits["max_pixels"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))


def answer(connection: Connection, data: bytes, limits: Limits) -> None:
    """Decode one image and send the result."""
    try:
        width, height, rgb = decode(data, limits)
    except Refused as refused:
        send(connection, {"code": refused.code, "reason": refused.reason[:500]})
        return
    send(connection, {"width": width, "height": height})
    connection.send_bytes(rgb)


def send(connection: Connection, content: object) -> None:
    """Send JSON."""
    connection.send_bytes(json.dumps(content).encode())


def main() -> None:
    """Serve until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    told: dict[str, Any] = json.loads(connection.recv_bytes())
    # Sizes are checked by our own limits. A file that ends early is refused.
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("ignore")
    Image.preinit()
    _limit_process(told)
    with suppress(EOFError, OSError):
        while True:
            data = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, told["cpu_s"])
            answer(connection, data, told)
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()

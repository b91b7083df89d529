"""Decoding of images by Pillow, processing by Transformers, and the process that does both.

`ImageDecoder` runs this file as a program with the descriptor of a connection. Its first message
configures it (JSON). Each job is two messages: what to do (JSON), and an image file. Each answer is
JSON: the size, and of a whole job the id, after which the data follows in a message of its own; or
why the image is refused. An image that takes too much CPU time ends the process by SIGPROF, even
within C code; address space is limited.

The libraries that read images are C code behind hostile input: this process has no other
descriptors, writes no files, and what it returns is checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL import WebPImagePlugin as _  # noqa: F401  (the only format that `preinit` leaves out)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats as Pillow names them. A file's content decides, not its name or declared type."""

_ORIENTATION = 0x0112
"""The tag of EXIF."""

_LATE_METADATA = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Marks of metadata that a PNG may have after its pixels."""

_SPARE_BYTES = 256 << 20
_BYTES_PER_PIXEL = 24
"""Address space for the largest image: four bytes per pixel as decoded, turned, with transparency,
on a white ground, and three as returned, twice."""

_BYTES_PER_PROCESSED_PIXEL = 64
"""The same for the largest image that a processor makes: eight bytes and four for each colour,
twice each, and the copies in patches."""

Process = Callable[..., bytes]
"""`features_of` of a model."""

T = TypeVar("T")

Limits = Mapping[str, int]


class Refused(Exception):
    """An image that can't be used: the error's code, and why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def decode(data: bytes, limits: Limits) -> Image.Image:
    """Decode an image: the first frame, upright by its EXIF orientation, on white, as RGB.

    Args:
        data: A file's content.
        limits: `max_pixels` and `max_side`, checked before anything is decoded.

    Raises:
        Refused: invalid_image, image_too_large.
    """

    def work(image: Image.Image) -> Image.Image:
        image.load()
        return as_rgb(upright(image))

    return _read(data, limits, work)


def size_of(data: bytes, limits: Limits) -> tuple[int, int]:
    """Return the size of an image as `decode` makes it, by its header and its orientation alone.

    Raises:
        Refused: As for `decode`, as far as the header shows it.
    """
    late = any(mark in data for mark in _LATE_METADATA)

    def work(image: Image.Image) -> tuple[int, int]:
        width, height = image.size
        try:
            # The reader for PNG would decode the pixels first, to find what comes after these.
            exif = image.getexif() if late else Image.Image.getexif(image)
            turned = exif.get(_ORIENTATION) in (5, 6, 7, 8)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  (as in `upright`)
            turned = False
        return (height, width) if turned else (width, height)

    return _read(data, limits, work)


def _read(data: bytes, limits: Limits, work: Callable[[Image.Image], T]) -> T:
    """Open an image, check its size, and return the result of `work`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, limits)
            return work(image)
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


def id_of(width: int, height: int, rgb: bytes) -> str:
    """Return an image's id: SHA-256 of the size and all pixels, in hex."""
    digest = hashlib.sha256(b"%d %d " % (width, height))
    digest.update(rgb)
    return digest.hexdigest()


def features_of(
    processor: Any, options: Mapping[str, Any], image: Image.Image, *, alone: bool
) -> bytes:
    """Return the inputs of a model's vision part for an image, as a safetensors file.

    Args:
        processor: Transformers' image processor, with the PIL back end.
        options: Its arguments.
        image: RGB.
        alone: Whether the prompt has no other image.
    """
    import numpy as np
    from safetensors.numpy import save

    # LLaVA-OneVision processes one of several images in another way.
    count = 1 if alone or "batch_num_images" not in processor.model_input_names else 2
    batch = processor(
        [[np.asarray(image)] * count],
        return_tensors="np",
        # Otherwise an image of 1 or 3 rows is taken for one of so many channels.
        input_data_format="channels_last",
        **options,
    )
    if count > 1:
        batch |= {name: batch[name][:1] for name in ("pixel_values", "image_sizes")}
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    return save({name: np.ascontiguousarray(a) for name, a in arrays.items() if a.dtype != object})


def load_process(folder: str, options: Mapping[str, Any]) -> Process:
    """Load the image processor of a model's folder, without torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor
    processor = auto.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False
    )
    return partial(features_of, processor, options)


def _limit_process(limits: Limits) -> None:
    """Give up what decoding doesn't need."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _SPARE_BYTES
        most += 2 * limits["max_bytes"] + _BYTES_PER_PIXEL * limits["max_pixels"]
        if limits["processes"]:
            most += _BYTES_PER_PROCESSED_PIXEL * limits["max_pixels"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))


def answer(
    connection: Connection,
    job: Mapping[str, Any],
    data: bytes,
    limits: Limits,
    process: Process | None = None,
) -> None:
    """Do one job and send the result."""
    found: dict[str, Any] = {}
    try:
        if job["size_only"]:
            found["width"], found["height"] = size_of(data, limits)
            send(connection, found)
            return
        image = decode(data, limits)
        rgb = image.tobytes()
        found = {"width": image.width, "height": image.height, "id": id_of(*image.size, rgb)}
        result = rgb if process is None else processed(process, image, alone=job["alone"])
    except Refused as refused:
        send(connection, {"code": refused.code, "reason": refused.reason[:500]})
        return
    send(connection, found)
    connection.send_bytes(result)


def processed(process: Process, image: Image.Image, *, alone: bool) -> bytes:
    """Return the result of `process`.

    Raises:
        Refused: invalid_image, image_too_large.
    """
    try:
        return process(image, alone=alone)
    except MemoryError:
        reason = "processing it takes more memory than it may; scale it down"
        raise Refused("image_too_large", reason) from None
    # Errors of Transformers' code for images that it can't process.
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        reason = f"the model's processor can't take it ({error}); send one of another size"
        raise Refused("invalid_image", reason) from None


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
    process = load_process(told["processor"], told["options"]) if told["processor"] else None
    _limit_process(told | {"processes": process is not None})
    with suppress(EOFError, OSError):
        while True:
            job, data = json.loads(connection.recv_bytes()), connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, told["cpu_s"])
            answer(connection, job, data, told, process)
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()

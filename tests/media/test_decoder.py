"""Image files of every kind become pixels, or are refused; none harms this process."""

from __future__ import annotations

import io
import os
import signal
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from nano_inference.config import ConfigError, ImagesConfig
from nano_inference.media.decode_process import id_of
from nano_inference.media.decoder import DecodedImage, ImageDecoder

from ..errors import raises
from .pictures import chunk, picture, png, saved, webp_of_size

LIMITS = ImagesConfig(max_bytes=200_000, max_pixels=1_000_000, max_side=4000, decoders=1)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder(LIMITS)
    yield made
    made.close()


def pixels(image: Image.Image) -> DecodedImage:
    rgb = image.tobytes()
    return DecodedImage(id_of(*image.size, rgb), *image.size, rgb)


# --- good files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 100})],
)
def test_each_format_becomes_rgb(
    decoder: ImageDecoder, format: str, options: dict[str, object]
) -> None:
    data = saved(picture(), format, **options)
    found = decoder.decode(data)
    with Image.open(io.BytesIO(data)) as image:
        assert found == pixels(image.convert("RGB"))
    if format in ("PNG", "WEBP"):
        assert found == pixels(picture())


def test_the_id_is_of_size_and_pixels_whatever_the_file(decoder: ImageDecoder) -> None:
    image = picture()
    ids = {decoder.decode(saved(image, *how)).id for how in (("PNG",), ("GIF",))}
    ids.add(decoder.decode(saved(image, "WEBP", lossless=True)).id)
    assert len(ids) == 1, "15 colours fit the palette of a GIF"
    assert len(ids.pop()) == 64
    assert id_of(3, 2, bytes(18)) != id_of(2, 3, bytes(18))


def test_an_image_is_turned_upright(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    found = decoder.decode(saved(picture(5, 3), "PNG", exif=exif))
    assert found == pixels(picture(5, 3).transpose(Image.Transpose.ROTATE_270))


def test_a_size_is_that_of_the_decoded_image(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    whole = saved(picture(5, 3), "PNG")
    end = whole.index(b"IEND") - 4
    late = whole[:end] + chunk(b"eXIf", exif.tobytes()[6:]) + whole[end:]
    files = [saved(picture(5, 3), kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    for data in (*files, late, whole, saved(picture(3, 5), "GIF")):
        found = decoder.decode(data)
        assert decoder.size(data) == (found.width, found.height)
    assert decoder.size(late) == (3, 5)


def test_a_size_is_read_without_the_pixels(decoder: ImageDecoder) -> None:
    for kind in ("PNG", "JPEG"):
        data = saved(picture(64, 40), kind)
        assert decoder.size(data[: len(data) * 3 // 4]) == (64, 40)
    with raises("image_too_large", "65000 x 65000"):
        decoder.size(png(65_000, 65_000))


def test_an_unreadable_orientation_leaves_the_image_as_it_is(decoder: ImageDecoder) -> None:
    data = saved(picture(), "JPEG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert (decoder.decode(data).width, decoder.decode(data).height) == (5, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_on_white(decoder: ImageDecoder, mode: str) -> None:
    image, options = Image.new("RGBA", (4, 1), (0, 0, 0, 0)), {}
    image.putpixel((1, 0), (0, 0, 0, 255))
    if mode == "P":
        image = Image.new("P", (4, 1), 0)
        image.putpalette([0, 0, 0, 0, 0, 0])
        image.putpixel((1, 0), 1)
        options = {"transparency": 0}
    else:
        image = image.convert(mode)
    found = decoder.decode(saved(image, "PNG", **options))
    assert found.data == b"\xff" * 3 + b"\0" * 3 + b"\xff" * 6


def test_16_bits_become_8_and_cmyk_becomes_rgb(decoder: ImageDecoder) -> None:
    rows = b"\0" + struct.pack(">4H", 0, 128 << 8, 255 << 8, 65535)
    grey = png(4, 1, chunk(b"IDAT", zlib.compress(rows)), depth=16, colour=0)
    assert decoder.decode(grey).data == b"".join(bytes([v] * 3) for v in (0, 128, 255, 255))
    cmyk = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    red, green, blue = decoder.decode(saved(cmyk, "JPEG", quality=100)).data[:3]
    assert red < 8
    assert min(green, blue) > 247
    assert decoder.decode(saved(picture(mode="1"))).width == 5


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(decoder: ImageDecoder, format: str) -> None:
    first, second = Image.new("RGB", (6, 6), "red"), Image.new("RGB", (6, 6), "blue")
    lossless = {"lossless": True} if format == "WEBP" else {}
    data = saved(first, format, save_all=True, append_images=[second], **lossless)
    assert decoder.decode(data) == pixels(first)


def test_the_content_decides_the_format(decoder: ImageDecoder) -> None:
    """There is no name or type to be wrong: only bytes are given."""
    with raises("invalid_image", "no readable PNG, JPEG, WebP or GIF"):
        decoder.decode(saved(picture(), "BMP"), "images[2]")


# --- bad files ---------------------------------------------------------------------------------

WHOLE = saved(picture(64, 64))
BOMB = zlib.compress(bytes(3000 * 3000 // 8 + 3000))
BAD = {
    "nothing": (b"", "invalid_image", "empty"),
    "text": (b"GIF? no, a text", "invalid_image", "no readable"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image", "no readable"),
    "tiff": (saved(picture(), "TIFF"), "invalid_image", "no readable"),
    "pdf": (saved(picture(), "PDF"), "invalid_image", "no readable"),
    "postscript, which would run": (saved(picture(), "EPS"), "invalid_image", "no readable"),
    "a cut-off png": (WHOLE[: len(WHOLE) // 2], "invalid_image", "damaged"),
    "a cut-off jpeg": (saved(picture(64, 64), "JPEG")[:-200], "invalid_image", "damaged"),
    "a cut-off webp": (saved(picture(64, 64), "WEBP")[:-60], "invalid_image", "save it anew"),
    "a cut-off gif": (saved(picture(64, 64), "GIF")[:-300], "invalid_image", "damaged"),
    "a png without pixels": (png(9, 9), "invalid_image", "damaged"),
    "a png with a wrong checksum": (
        WHOLE[:40] + bytes([WHOLE[40] ^ 1]) + WHOLE[41:],
        "invalid_image",
        None,
    ),
    "a png without width": (png(0, 9), "invalid_image", None),
    "a header of 4 billion pixels": (png(65_000, 65_000), "image_too_large", "65000 x 65000"),
    "a header beyond 32 bits": (png(2**31 - 1, 2**31 - 1), "image_too_large", "scale it down"),
    "a bomb of a kilobyte": (
        png(3000, 3000, chunk(b"IDAT", BOMB), depth=1, colour=0),
        "image_too_large",
        "3000 x 3000",
    ),
    "a long thin image": (png(4001, 1), "image_too_large", "sides of 4000"),
    "a compressed text of 16 MB": (
        png(1, 1, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(16 << 20), 9))),
        "invalid_image",
        None,
    ),
    "a profile of 16 MB": (
        png(1, 1, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(16 << 20), 9))),
        "invalid_image",
        None,
    ),
    "a canvas of 268 million pixels": (webp_of_size(16383, 16383), "invalid_image", None),
    "a gif with a frame beyond its screen": (
        b"GIF89a\x01\0\x01\0\0\0\0"
        + b",\0\0\0\0"
        + struct.pack("<HH", 60_000, 60_000)
        + b"\0\x02\0;",
        "image_too_large",
        "60000",
    ),
    "a file larger than allowed": (bytes(200_001), "image_too_large", "200001 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(decoder: ImageDecoder, name: str) -> None:
    data, code, words = BAD[name]
    with raises(code, words):
        decoder.decode(data, "images[0]")
    assert decoder.decode(saved(picture())) == pixels(picture())


def test_settings_that_can_not_hold_an_image_are_refused() -> None:
    with pytest.raises(ConfigError, match="images\\.store_bytes"):
        ImagesConfig(store_bytes=1 << 20)


# --- the process -------------------------------------------------------------------------------


def child_of(decoder: ImageDecoder) -> int:
    worker = decoder._idle.queue[-1]
    assert worker._child is not None
    return int(worker._child.process.pid)


def test_a_process_that_ended_is_started_again(decoder: ImageDecoder) -> None:
    decoder.decode(saved(picture()))
    os.kill(before := child_of(decoder), signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert decoder.decode(saved(picture())) == pixels(picture())
    assert child_of(decoder) != before


def test_an_image_that_kills_its_process_is_refused(decoder: ImageDecoder) -> None:
    """A defect of a decoder, or the kernel for want of memory, may kill it."""
    decoder.decode(saved(picture()))
    os.kill(child := child_of(decoder), signal.SIGSTOP)
    killer = threading.Timer(0.05, os.kill, (child, signal.SIGKILL))
    killer.start()
    with raises("image_decode_failed", "ended its process"):
        decoder.decode(saved(picture()))
    killer.join()
    assert decoder.decode(saved(picture())) == pixels(picture())


def test_a_process_that_hangs_is_ended() -> None:
    decoder = ImageDecoder(LIMITS)
    decoder.decode(saved(picture()))
    os.kill(child_of(decoder), signal.SIGSTOP)
    for worker in decoder._idle.queue:
        worker._patience_s = 0.1
    with raises("image_decode_failed", "took too long"):
        decoder.decode(saved(picture()))
    decoder.close()


def test_an_image_that_takes_too_much_time_is_refused() -> None:
    decoder = ImageDecoder(ImagesConfig(decoders=1, decode_timeout_s=0.001, max_pixels=40_000_000))
    data = png(3000, 3000, chunk(b"IDAT", zlib.compress(bytes(3001 * 3000), 1)), colour=0)
    with raises("image_decode_failed", "CPU time"):
        decoder.decode(data)
    decoder.close()


def test_memory_is_limited() -> None:
    """By address space: a decoder that takes far more than its image needs gets an error."""
    decoder = ImageDecoder(ImagesConfig(decoders=1, max_pixels=9_000_000))
    small = ImageDecoder(LIMITS)
    data = png(3000, 3000, chunk(b"IDAT", zlib.compress(bytes(3001 * 3000), 1)), colour=0)
    assert decoder.decode(data).width == 3000
    small.decode(saved(picture()))
    process = Path(f"/proc/{child_of(small)}")
    most = int((process / "limits").read_text().partition("Max address space")[2].split()[0])
    used = int((process / "statm").read_text().split()[0])
    assert most < used * os.sysconf("SC_PAGE_SIZE") + (512 << 20)
    decoder.close()
    small.close()


def test_the_process_ends_with_its_owner() -> None:
    decoder = ImageDecoder(LIMITS)
    decoder.decode(saved(picture()))
    process = decoder._idle.queue[-1]._child.process
    del decoder
    assert process.wait(10) is not None

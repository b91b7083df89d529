"""Settings of images in prompts."""

from __future__ import annotations

from typing import Annotated, ClassVar

from .base import PositiveInt, Range, Seconds, Section

RGB_BYTES = 3
"""Bytes of a decoded pixel."""


class ImagesConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Images in prompts. docs/images.md.

    Attributes:
        max_per_request: Limit on the images of one request.
        max_bytes: Size limit of an image's file.
        max_pixels: Limit on its width times its height.
        max_side: Limit on its width, and on its height, in pixels.
        decoders: Processes that decode images, one at a time each.
        decode_timeout_s: CPU time limit for decoding one image.
        store_bytes: Memory for decoded images, in this process or on Redis: those of requests in
            flight, and earlier ones until others need the room.
    """

    SECTION: ClassVar[str] = "images"

    max_per_request: PositiveInt = 32
    max_bytes: PositiveInt = 16 << 20
    max_pixels: PositiveInt = 40_000_000
    max_side: Annotated[int, Range("from 1 to 65535", 1, 65_535)] = 16_384
    decoders: Annotated[int, Range("from 1 to 64", 1, 64)] = 2
    decode_timeout_s: Seconds = 10.0
    store_bytes: PositiveInt = 1 << 30

    def check(self) -> None:
        self.require(
            "store_bytes",
            self.store_bytes >= RGB_BYTES * self.max_pixels,
            f"at least {RGB_BYTES} times images.max_pixels, or an image of that size could never "
            "be stored",
        )

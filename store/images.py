"""Decoded images by id."""

from __future__ import annotations

import hashlib

import msgspec


class StoredImage(msgspec.Struct, frozen=True):
    """A decoded image.

    Attributes:
        width, height: In pixels.
        rgb: `[height, width, 3]` bytes.
    """

    width: int
    height: int
    rgb: bytes

    @property
    def id(self) -> str:
        """SHA-256 of the size and all pixels, in hex: equal images have equal ids."""
        digest = hashlib.sha256(b"%d %d " % (self.width, self.height))
        digest.update(self.rgb)
        return digest.hexdigest()

"""Images of `/inference/v1/generate`: files, or the features that `render` has returned."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from ...bus.public import ImageInput
from ..server.http import field_error
from .fields import RefusedField, convert_part
from .images import ImageSource, of_base64, of_url

IMAGE = "image"

_FILE = "nano-inference-file:"
"""The beginning of an item of `kwargs_data` that is a file, and not vLLM's tensors."""


class ContentPart(msgspec.Struct, frozen=True):
    """An entry of `content_parts`: an image, which stands for a placeholder of `token_ids`."""

    NEUTRAL: ClassVar = {"uuid": "an image is known by its pixels"}

    type: str
    url: str


class PlaceholderRange(msgspec.Struct, frozen=True):
    """The tokens of an image."""

    offset: int
    length: int


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """`features`: the images of `token_ids`, which has all of their tokens."""

    REFUSED: ClassVar = {"mm_metadata": RefusedField("nothing is handed to other servers")}

    mm_hashes: dict[str, list[str]] = {}
    # Of `PlaceholderRange`.
    mm_placeholders: dict[str, Any] = {}
    kwargs_data: dict[str, list[str | None]] | None = None


def images_of(parts: Sequence[ContentPart], features: Features | None) -> list[ImageSource]:
    """Return the images of a body, in the order of their tokens.

    Raises:
        FieldError: unsupported: they are of another kind, or vLLM's tensors; invalid_image.
    """
    if parts and features is not None:
        raise field_error("content_parts", "and features are both there; give one of them")
    found: list[ImageSource] = []
    for place, part in enumerate(parts):
        where = f"content_parts[{place}]"
        if part.type != "image_url":
            raise field_error(
                where, f": {part.type!r:.40} is not supported here; send images", code="unsupported"
            )
        found.append(of_url(part.url, f"{where}.url"))
    return found if features is None else _of_features(features)


def _of_features(features: Features) -> list[ImageSource]:
    kind = dict[str, list[PlaceholderRange]]
    ranges = convert_part(features.mm_placeholders, kind, "features.mm_placeholders")
    data = features.kwargs_data or {}
    for other in {*data, *ranges, *features.mm_hashes} - {IMAGE}:
        raise field_error("features", f"have {other!r:.40}; send images", code="unsupported")
    items, places = data.get(IMAGE, []), ranges.get(IMAGE, [])
    if len(items) != len(places):
        raise field_error(
            "features",
            f"have {len(places)} mm_placeholders and {len(items)} items of kwargs_data; give the "
            "data of each image",
        )
    found: list[ImageSource] = []
    for place in sorted(range(len(items)), key=lambda each: places[each].offset):
        item, where = items[place], f"features.kwargs_data.image[{place}]"
        if item is None or not item.startswith(_FILE):
            raise field_error(
                where,
                "is not of this server's render, and tensors that a client has made are not taken; "
                "send images as content_parts, or features of /v1/chat/completions/render",
                code="unsupported",
            )
        found.append(of_base64(item.removeprefix(_FILE), where))
    return found


def features_of(images: Sequence[ImageInput], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the features of a rendered prompt, as `images_of` reads them.

    Args:
        places: As of `Images.located`.
    """
    return {
        "mm_hashes": {IMAGE: [hashlib.sha256(image.data).hexdigest() for image in images]},
        "mm_placeholders": ranges_of(places),
        "kwargs_data": {IMAGE: [_FILE + base64.b64encode(image.data).decode() for image in images]},
    }


def ranges_of(places: Sequence[tuple[int, int]]) -> dict[str, list[dict[str, int]]]:
    """Return where the tokens of images are, as vLLM writes it."""
    return {IMAGE: [{"offset": offset, "length": length} for offset, length in places]}

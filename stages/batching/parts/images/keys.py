"""The images of a sequence, and the ids by which its KV is found."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, overload

from .....bus.media import MediaItem

_MARK, _HASHED = 1 << 62, (1 << 62) - 1
"""Ids of placeholders have the mark, which no token id has, and 62 bits of a hash."""


class PlacedImage(NamedTuple):
    """An image of a sequence.

    Attributes:
        item: The image.
        places: Indices of its placeholders, rising.
    """

    item: MediaItem
    places: Seq[int]


class KeyIds(Seq[int]):
    """A sequence's token ids with those of placeholders replaced, by which its KV is found.

    So equal placeholders never share KV, and equal images do. The tokens are the sequence's own
    list, which grows.
    """

    def __init__(self, token_ids: list[int], images: Iterable[PlacedImage]) -> None:
        """Take a sequence's tokens and images."""
        self._token_ids = token_ids
        last = max(image.places[-1] for image in images)
        self._prompt = token_ids[: last + 1]
        for image in images:
            for place, key in zip(image.places, _keys_of(image.item), strict=True):
                self._prompt[place] = key

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        split = len(self._prompt)
        if isinstance(index, int):
            index = range(len(self))[index]
            return self._prompt[index] if index < split else self._token_ids[index]
        start, stop, step = index.indices(len(self))
        if start >= split:
            return self._token_ids[index]
        if step != 1:
            return [self[place] for place in range(start, stop, step)]
        return self._prompt[start:stop] + self._token_ids[split:stop]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyIds) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]


def place(media: Iterable[MediaItem], prompt: Seq[int]) -> tuple[PlacedImage, ...]:
    """Return the images of a prompt, in order."""
    return tuple(PlacedImage(item, item.places(prompt)) for item in media)


def _keys_of(item: MediaItem) -> Iterable[int]:
    """Return a key for each token of an image: equal only if the image and its tokens are."""
    name = f"{item.id} {item.num_tokens}".encode()
    hashed = array("Q", hashlib.shake_256(name).digest(8 * item.num_tokens))
    return (_MARK | number & _HASHED for number in hashed)

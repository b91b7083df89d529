"""Images of the engine's requests: PIL images, paths or files, kept until they have ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..bus.public import GenerateRequest, ImageInput
from ..bus.steps import StepPlan
from ..config import ImagesConfig, RequestError
from ..media.decoder import check_pixels
from ..stages.admission.arrivals import Tokens
from ..store.images import StoredImage
from ..text.images import Size
from .engine_requests import ArgumentError, same_number

if TYPE_CHECKING:
    from PIL import Image

_FILE = bytes | bytearray | memoryview


def images_of_all(images: Any, number: int) -> list[list[Any]]:
    """Return the images of each of `number` prompts.

    Args:
        images: None, or for each prompt its images: a list, one image, or None.

    Raises:
        ArgumentError: It is no list with one entry for each prompt.
    """
    if images is None:
        return [[] for _ in range(number)]
    if not isinstance(images, Sequence) or isinstance(images, str | _FILE):
        raise ArgumentError(
            f"images is of type {type(images).__name__}; pass a list with the images of each "
            "prompt, or None for a prompt without any",
            code="invalid_image",
        )
    return [images_of_one(each) for each in same_number(list(images), number, "images")]


def images_of_one(images: Any) -> list[Any]:
    """Return the images of a prompt, given as a list, one image, or None."""
    if images is None:
        return []
    is_list = isinstance(images, list | tuple)
    return list(images) if is_list else [images]


class EngineImages:
    """Images by id, as long as an unfinished request has them."""

    def __init__(self) -> None:
        self._config = ImagesConfig()
        # Those of requests that are being made.
        self._given: dict[str, StoredImage] = {}
        self._images: dict[str, StoredImage] = {}
        self._ids: dict[str, tuple[str, ...]] = {}
        self._holders: Counter[str] = Counter()

    @contextmanager
    def given_to(
        self, requests: Sequence[GenerateRequest], images: Any
    ) -> Iterator[list[GenerateRequest]]:
        """Give requests their images, which are dropped on exit unless their request was added.

        Args:
            requests: Without images.
            images: As for `images_of_all`.

        Raises:
            RequestError: invalid_image, image_too_large.
        """
        try:
            yield [
                replace(request, images=self._inputs(own)) if own else request
                for request, own in zip(requests, images_of_all(images, len(requests)), strict=True)
            ]
        finally:
            self._given.clear()

    def _inputs(self, images: Iterable[Any]) -> tuple[ImageInput, ...]:
        """Return images as in a request.

        Args:
            images: PIL images, paths, or the content of files.

        Raises:
            RequestError: invalid_image, image_too_large.
        """
        return tuple(self._input(image, f"images[{at}]") for at, image in enumerate(images))

    def _input(self, image: Any, where: str) -> ImageInput:
        if isinstance(image, str | os.PathLike):
            try:
                return ImageInput(data=Path(image).expanduser().read_bytes())
            except OSError as error:
                raise RequestError(
                    f"{where} can't be read: {error}; give the path of a file",
                    code="invalid_image",
                ) from None
        if isinstance(image, _FILE):
            return ImageInput(data=bytes(image))
        if isinstance(image, ImageInput):
            return image
        if not hasattr(image, "tobytes") or not hasattr(image, "getbands"):
            raise ArgumentError(
                f"{where} is of type {type(image).__name__}; give a PIL image, a path, or the "
                "bytes of a file",
                code="invalid_image",
            )
        found = _pixels(image)
        check_pixels(found, self._config, where)
        self._given[found.id] = found
        return ImageInput(id=found.id)

    @property
    def known(self) -> dict[str, Size]:
        """Sizes by id of all images here."""
        return {
            id: (image.width, image.height) for id, image in {**self._images, **self._given}.items()
        }

    def add(self, name: str, tokens: Tokens | None) -> None:
        """Keep the images of a request that is added under this name; None: it has none."""
        if tokens is None:
            return
        found = {**self._given, **{image.id: image for image in tokens.pixels}}
        ids = tuple(dict.fromkeys(item.id for item in tokens.media))
        for id in ids:
            self._images.setdefault(id, found.get(id) or self._images[id])
        self._ids[name] = ids
        self._holders.update(ids)

    def remove(self, name: str) -> None:
        """Drop the images of a request that has ended, unless others have them."""
        for id in self._ids.pop(name, ()):
            self._holders[id] -= 1
            if not self._holders[id]:
                del self._holders[id], self._images[id]

    def of(self, plan: StepPlan) -> dict[str, StoredImage]:
        """Return the images that a step encodes."""
        return {item.id: self._images[item.id] for item in plan.encodes if item.id in self._images}


def _pixels(image: Image.Image) -> StoredImage:
    """Return an image as the decoding of a file does: upright, RGB, on white."""
    from ..media.decode_process import as_rgb, upright

    image = as_rgb(upright(image))
    return StoredImage(*image.size, image.tobytes())

"""Images of the engine's requests: PIL images, paths or files, kept until they have ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..bus.parts.images import ImagesPlan, PromptMedia
from ..bus.public import GenerateRequest, ImageInput
from ..bus.steps import StepPlan
from ..config import ImagesConfig, RequestError
from ..media.decode_process import as_rgb, id_of, upright
from ..media.decoder import check_size, refusal
from ..stages.admission.arrivals import PromptImage, Tokens
from ..stages.admission.parts.images import Images
from ..store.images import StoredImage
from ..text.images import Size
from .engine_requests import ArgumentError, same_number

if TYPE_CHECKING:
    from PIL import Image

    from ..stages.admission.core import AdmissionCore
    from ..stages.executor.core import ExecutorCore

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
        # Those of requests that are being made, by id, as RGB.
        self._given: dict[str, Image.Image] = {}
        # By name.
        self._images: dict[str, StoredImage] = {}
        # Of requests that are being made.
        self._made: dict[str, StoredImage] = {}
        self._names: dict[str, tuple[str, ...]] = {}
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
            self._made.clear()

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
        width, height = image.size
        check_size(width, height, self._config, where)
        rgb = as_rgb(upright(image))
        id = id_of(*rgb.size, rgb.tobytes())
        self._given[id] = rgb
        return ImageInput(id=id)

    def load(self, core: AdmissionCore, request: GenerateRequest) -> tuple[PromptImage, ...]:
        """Decode and process the images of a request that `core` has checked.

        They are dropped with `given_to`, unless `add` comes before.

        Raises:
            RequestError: unknown_image, invalid_image, image_too_large, image_decode_failed,
                prompt_too_long.
        """
        images = core.part(Images)
        tenant, alone = core.sharing_tenant(request), len(request.images) == 1
        sizes: list[Size] = []
        for position, image in enumerate(request.images):
            where = f"images[{position}]"
            name = images.name(image.id, tenant, alone=alone)
            if image.data:
                sizes.append(images.decoder.size(image.data, where))
            elif image.id in self._given:
                sizes.append(self._given[image.id].size)
            elif (known := self._images.get(name)) is not None:
                sizes.append((known.width, known.height))
            else:
                reason = "no request in flight has an image of this id; give the image"
                raise refusal("unknown_image", where, reason)
        images.check_tokens(sizes)
        found: list[PromptImage] = []
        for position, (image, size) in enumerate(zip(request.images, sizes, strict=True)):
            id = image.id
            if image.data:
                made = images.decoder.decode(image.data, f"images[{position}]", alone=alone)
                id, features = made.id, made.data
            name = images.name(id, tenant, alone=alone)
            if name not in self._images:
                if not image.data:
                    features = images.features(self._given[id], alone=alone)
                self._made[name] = StoredImage(*size, features)
            found.append(PromptImage(id, size, name))
        return tuple(found)

    def add(self, name: str, tokens: Tokens | None) -> None:
        """Keep the images of a request that is added under this name; None: it has none."""
        media = None if tokens is None else PromptMedia.find(tokens.parts)
        if media is None:
            return
        names = tuple(dict.fromkeys(item.name for item in media.items))
        for each in names:
            if each not in self._images:
                self._images[each] = self._made[each]
        self._made.clear()
        self._names[name] = names
        self._holders.update(names)

    def remove(self, name: str) -> None:
        """Drop the images of a request that has ended, unless others have them."""
        for each in self._names.pop(name, ()):
            self._holders[each] -= 1
            if not self._holders[each]:
                del self._holders[each], self._images[each]

    def give(self, executor: ExecutorCore, plan: StepPlan) -> None:
        """Give the executor the images that a plan encodes."""
        if plan.parts and (found := ImagesPlan.find(plan.parts)) is not None:
            names = {item.name for item in found.encodes}
            given = {name: self._images[name] for name in names if name in self._images}
            from ..stages.executor.parts.images import Images

            executor.part(Images).give(given)

"""Images as callers of the engine give them: PIL images, paths or files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bus.public import GenerateRequest, ImageInput
from ..config import ImagesConfig, RequestError
from ..media.decode_process import as_rgb, id_of, upright
from ..media.decoder import check_size, refusal
from ..stages.admission.arrivals import PromptImage
from ..stages.admission.parts.images import Images
from ..store.images import StoredImage
from .engine_requests import ArgumentError

if TYPE_CHECKING:
    from PIL import Image

    from ..stages.admission.core import AdmissionCore
    from ..text.image_tokens import Size

_FILE = bytes | bytearray | memoryview


class ImageInputs:
    """The images of requests that are being made.

    Attributes:
        made: Processed images, by name.
    """

    def __init__(self) -> None:
        self.made: dict[str, StoredImage] = {}
        self._config = ImagesConfig()
        # By id, as RGB.
        self._given: dict[str, Image.Image] = {}

    def inputs(self, images: Iterable[Any]) -> tuple[ImageInput, ...]:
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
                    f"{where} can't be read ({error.strerror}); give the path of a file",
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
        try:
            rgb = as_rgb(upright(image))
            pixels = rgb.tobytes()
        except (ValueError, OSError) as error:
            raise ArgumentError(
                f"{where} can't be read ({error}); give an open, whole picture, a path, or the "
                "bytes of a file",
                code="invalid_image",
            ) from None
        id = id_of(*rgb.size, pixels)
        self._given[id] = rgb
        return ImageInput(id=id)

    def load(
        self, core: AdmissionCore, request: GenerateRequest, kept: Mapping[str, StoredImage]
    ) -> tuple[PromptImage, ...]:
        """Decode and process the images of a request that `core` has checked.

        Args:
            core: Admission.
            request: The request.
            kept: Images of unfinished requests, by name.

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
            elif (known := kept.get(name)) is not None:
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
            if name not in kept:
                if not image.data:
                    features = images.features(self._given[id], alone=alone)
                self.made[name] = StoredImage(*size, features)
            found.append(PromptImage(id, size, name))
        return tuple(found)

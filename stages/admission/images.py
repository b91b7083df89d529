"""Images of requests: their files decoded, their tokens in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...bus.control import ImageCapacity
from ...bus.media import MediaItem
from ...bus.public import GenerateRequest, ImageInput, ImagePart
from ...config import ImagesConfig, RequestError
from ...media.decoder import ImageDecoder, refusal
from ...store.images import StoredImage
from ...text.images import Expanded, ImageProcessor, Size

_ID_CHARACTERS = 64


class PromptImage(NamedTuple):
    """An image of a prompt.

    Attributes:
        id: Of its pixels.
        size: Width and height.
        pixels: None if it is in the store.
    """

    id: str
    size: Size
    pixels: StoredImage | None = None


Known = Mapping[str, Size]
"""Sizes by id of images in the store, which the request holds there."""

NOTHING_KNOWN: Known = {}


class RequestImages:
    """Checks and decodes the images of requests, by the limits of the settings and the model."""

    def __init__(
        self, config: ImagesConfig, processor: ImageProcessor | None, has_reference: bool
    ) -> None:
        """Args:
        config: Limits.
        processor: None for a model without images.
        has_reference: Whether a reference model, which reads token ids, scores each response.
        """
        self.processor = processor
        self._config = config
        self._has_reference = has_reference
        self._decoder = ImageDecoder(config)

    def close(self) -> None:
        """End the processes that decode."""
        self._decoder.close()

    def check(
        self, request: GenerateRequest, capacity: ImageCapacity | None, model_name: str
    ) -> None:
        """Check a request's images without decoding them.

        Raises:
            RequestError: images_not_supported, too_many_images, invalid_image, image_too_large,
                images_mismatch, invalid_embed.
        """
        images = request.images
        parts = [
            part
            for message in request.messages or ()
            if not isinstance(message.content, str)
            for part in message.content
            if isinstance(part, ImagePart)
        ]
        if not images and not parts:
            return
        if self.processor is None or capacity is None:
            raise RequestError(
                f"{model_name} takes no images here; leave images out, or ask another model",
                code="images_not_supported",
            )
        if self._has_reference:
            raise RequestError(
                "a reference model scores each response here, and it sees no images; leave images "
                "out, or serve without engine.reference_model_path",
                code="images_not_supported",
            )
        if request.embed is not None:
            raise RequestError(
                "images do not go with embed; leave one of them out", code="invalid_embed"
            )
        most = self._config.max_per_request
        if len(images) > most:
            raise RequestError(
                f"the request has {len(images)} images, and at most {most} are taken "
                "(images.max_per_request); send fewer",
                code="too_many_images",
            )
        if request.messages is not None and len(parts) != len(images):
            raise RequestError(
                f"the messages have {len(parts)} parts of the type image for {len(images)} images; "
                "give one for each",
                code="images_mismatch",
            )
        for place, image in enumerate(images):
            self._check_one(image, f"images[{place}]")

    def _check_one(self, image: ImageInput, where: str) -> None:
        if bool(image.data) == bool(image.id):
            reason = "it has neither data nor id, or both; give one of them"
            raise refusal("invalid_image", where, reason)
        if image.id and (
            len(image.id) != _ID_CHARACTERS or set(image.id) - set("0123456789abcdef")
        ):
            reason = "its id is no SHA-256 of an image in lower-case hex; give the whole id"
            raise refusal("invalid_image", where, reason)
        if len(image.data) > self._config.max_bytes:
            reason = (
                f"its file has {len(image.data)} bytes, and at most {self._config.max_bytes} are "
                "taken (images.max_bytes); scale it down, or compress it more"
            )
            raise refusal("image_too_large", where, reason)

    def decode(self, request: GenerateRequest, known: Known) -> tuple[PromptImage, ...]:
        """Decode a request's images; slow. `check` comes before.

        Raises:
            RequestError: unknown_image, invalid_image, image_too_large, image_decode_failed.
        """
        found: list[PromptImage] = []
        for place, image in enumerate(request.images):
            where = f"images[{place}]"
            if image.data:
                pixels = self._decoder.decode(image.data, where)
                found.append(PromptImage(pixels.id, (pixels.width, pixels.height), pixels))
            elif image.id in known:
                found.append(PromptImage(image.id, known[image.id]))
            else:
                reason = "no image of this id is stored; send its file as data"
                raise refusal("unknown_image", where, reason)
        return tuple(found)

    def check_tokens(self, sizes: Sequence[Size], most: int) -> int:
        """Check the images' numbers of tokens, each at most `most`, and return their sum.

        Raises:
            RequestError: image_too_large, invalid_image.
        """
        assert self.processor is not None, "check comes before"
        numbers = self.processor.num_tokens(sizes)
        for place, number in enumerate(numbers):
            if number > most:
                reason = (
                    f"it takes {number} tokens, and one image may take {most} here "
                    "(engine.max_image_tokens_per_step); scale it down"
                )
                raise refusal("image_too_large", f"images[{place}]", reason)
        return sum(numbers)


def media_of(images: Sequence[PromptImage], expanded: Expanded) -> tuple[MediaItem, ...]:
    """Return a prompt's images for the lane."""
    return tuple(
        MediaItem(image.id, tokens.start, tokens.number, *image.size, alone=len(images) == 1)
        for image, tokens in zip(images, expanded.images, strict=True)
    )

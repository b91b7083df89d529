"""Images of requests: checks, names in the store, tokens in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from ....bus.control import ImageCapacity, ReplicaCapacity
from ....bus.media import MediaItem
from ....bus.parts.images import PromptMedia
from ....bus.public import GenerateRequest, ImageInput, ImagePart
from ....config import ImagesConfig, RequestError, prompt_too_long
from ....media.decode_process import Refused, features_of, processed
from ....media.decoder import ImageDecoder, ProcessorSource, refusal
from ....store.images import name_of
from ....text.image_tokens import Expanded, Size
from ..arrivals import PromptImage
from ..prompts import PromptReader
from . import Part

if TYPE_CHECKING:
    from PIL import Image

    from ....text.images import ImageProcessor

_ID_CHARACTERS = 64


class Images(Part):
    """Checks and decodes the images of requests, by the limits of the settings and the model.

    Attributes:
        processor: The model's; None for a model without images.
        decoder: Its processes.
    """

    fields: ClassVar = ("images", "messages")

    def __init__(
        self,
        config: ImagesConfig,
        processor: ImageProcessor | None,
        model_name: str,
        *,
        has_reference: bool,
    ) -> None:
        """Args:
        config: Limits.
        processor: None for a model without images.
        model_name: For errors.
        has_reference: Whether a reference model, which reads token ids, scores each response.
        """
        self.processor = processor
        self._config = config
        self._model_name = model_name
        self._has_reference = has_reference
        self._capacity: ImageCapacity | None = None
        self._max_model_len = 0
        source: ProcessorSource | None = None
        if processor is not None:
            source = ProcessorSource(str(processor.folder), processor.options)
        self.decoder = ImageDecoder(config, processor=source)

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        self._capacity = ImageCapacity.find(capacity.parts)
        self._max_model_len = capacity.max_model_len

    def close(self) -> None:
        """End the processes that decode."""
        self.decoder.close()

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
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
        if self.processor is None or self._capacity is None:
            raise RequestError(
                f"{self._model_name} takes no images here; leave images out, or ask another model",
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

    def name(self, id: str, tenant: str, *, alone: bool) -> str:
        """Return an image's name in the store.

        Args:
            id: Id of the image's pixels.
            tenant: Whose requests find it; "" if tenants share prefixes.
            alone: Whether its prompt has no other image.
        """
        assert self.processor is not None, "check comes before"
        other = self.processor.differs_in_company and not alone
        return name_of(id, self.processor.fingerprint, tenant, "in company" if other else "")

    def num_bytes(self, num_tokens: int) -> int:
        """Return about how many bytes images of so many tokens take in the store."""
        return round(self._bytes_per_token * num_tokens)

    @cached_property
    def _bytes_per_token(self) -> float:
        """Return the bytes per token of an empty image: processors make nearly equally many of all
        images.
        """
        from PIL import Image

        assert self.processor is not None, "check comes before"
        size = 64, 64
        features = self.features(Image.new("RGB", size), alone=True)
        return len(features) / self.processor.num_tokens([size])[0]

    def features(self, image: Image.Image, *, alone: bool) -> bytes:
        """Return an image as the model's vision part takes it, processed in this process.

        Args:
            image: RGB.
            alone: Whether its prompt has no other image.

        Raises:
            RequestError: invalid_image.
        """
        assert self.processor is not None, "check comes before"
        process = partial(features_of, self.processor.image_processor, self.processor.options)
        try:
            return processed(process, image, alone=alone)
        except Refused as refused:
            raise refusal(refused.code, "the image", refused.reason) from None

    def check_tokens(self, sizes: Sequence[Size]) -> int:
        """Check that a request's images are within all limits; return their tokens.

        Slow for sizes that the processor must try. Another thread may call it.

        Raises:
            RequestError: image_too_large, invalid_image, prompt_too_long.
        """
        assert self.processor is not None, "check comes before"
        assert self._capacity is not None, "check comes before"
        config, most = self._config, self._capacity.max_tokens
        self.processor.check_growth(sizes, max_pixels=config.max_pixels, max_side=config.max_side)
        numbers = self.processor.num_tokens(sizes)
        for place, number in enumerate(numbers):
            if number > most:
                reason = (
                    f"it takes {number} tokens, and one image may take {most} here "
                    "(engine.max_image_tokens_per_step); scale it down"
                )
                raise refusal("image_too_large", f"images[{place}]", reason)
        if (total := sum(numbers)) >= self._max_model_len:
            given = f"the prompt's images take {total}"
            raise prompt_too_long(self._max_model_len, given, "send fewer or smaller ones")
        return total

    def read(
        self, reader: PromptReader, prompt: Expanded, media: Sequence[PromptImage]
    ) -> PromptMedia | None:
        """Return the prompt's images for the lane."""
        assert len(media) == len(reader.request.images), "they are loaded before"
        if not media:
            return None
        items = [
            MediaItem(
                image.id,
                tokens.start,
                tokens.number,
                *image.size,
                alone=len(media) == 1,
                name=image.name,
                salt=reader.request.cache_salt,
            )
            for image, tokens in zip(media, prompt.images, strict=True)
        ]
        return PromptMedia(tuple(items))

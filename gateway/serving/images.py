"""Images in bodies of calls: inline, or fetched by URL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from ...bus.public import ImageInput
from ...config import ImagesConfig, RequestError, shown
from ...media.decoder import ImageDecoder, check_file
from ...media.fetch import ImageFetcher
from ...media.turns import FairDecoder
from ...text.forgiving_base64 import decode_base64
from ...text.image_tokens import Size
from ..server.http import field_error
from .capacity import Capacity
from .tokenizer import LazyTokenizer, Tokenizer

if TYPE_CHECKING:
    from ...text.images import ImageProcessor

FETCHES = 8
"""Images fetched at a time. One tenant alone may have half of these places."""

IMAGE = "image"
"""The type of an image's part, in the form of Transformers' chat templates."""

_AROUND_URLS = "".join(map(chr, range(0x21)))
"""Characters around a URL that browsers ignore."""

_MOST_HEAD = 256


class ImageSource(NamedTuple):
    """An image as a call names it: a file's content or a URL.

    Attributes:
        where: Its path in the body.
    """

    where: str
    data: bytes = b""
    url: str = ""


def image_part(source: ImageSource) -> dict[str, Any]:
    """Return an image as a part of a turn's content."""
    return {"type": IMAGE, "source": source}


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a turn's content."""
    return {"type": "text", "text": text}


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a turn's content: the parts, or without images their texts in one piece."""
    if any(part["type"] == IMAGE for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def of_url(url: str, where: str) -> ImageSource:
    """Read a data URI as browsers do, or a URL, which is fetched later.

    Raises:
        FieldError: invalid_image, invalid_image_url.
    """
    start = len(url) - len(url.lstrip(_AROUND_URLS))
    if url[start : start + 5].lower() != "data:":
        if ":" not in url[start : start + _MOST_HEAD]:
            raise field_error(
                where,
                f": {shown(url[:40])} is no URL; write the image as data:image/png;base64,… or "
                "give an address",
                code="invalid_image_url",
            )
        return ImageSource(where, url=url)
    comma = url.find(",", start, start + _MOST_HEAD)
    kind, _, coding = url[start:comma].rpartition(";")
    if comma < 0 or not kind or coding.strip().lower() != "base64":
        raise field_error(
            where,
            f": {shown(url[:40])} is no data URI with base64; write data:image/png;base64,…",
            code="invalid_image_url",
        )
    body = url[comma + 1 :].partition("#")[0]
    return of_base64(unquote(body, errors="replace") if "%" in body else body, where)


def of_base64(text: str, where: str) -> ImageSource:
    """Read a file in base64.

    Raises:
        FieldError: invalid_image.
    """
    try:
        return ImageSource(where, decode_base64(text))
    except ValueError:
        raise field_error(
            where, ": the image is not in base64; encode its file so", code="invalid_image"
        ) from None


def sources_in(turns: Iterable[dict[str, Any]]) -> list[ImageSource]:
    """Return the images of turns, in order."""
    return [
        part["source"]
        for turn in turns
        if isinstance(content := turn.get("content"), list)
        for part in content
        if part["type"] == IMAGE
    ]


def without_sources(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn as templates read it."""
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    parts = [{"type": IMAGE} if part["type"] == IMAGE else part for part in content]
    return turn | {"content": parts}


def text_in(turn: dict[str, Any]) -> str:
    """Return the text of a turn."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] != IMAGE)


class Images:
    """Loads the images of calls, and expands prompts with them where an answer shows the tokens."""

    def __init__(self, config: ImagesConfig, model_name: str, capacity: Capacity) -> None:
        """Args: limits, the model's name, and `FETCHES` slots shared by tenants."""
        self._config, self._model_name = config, model_name
        self._fetcher = ImageFetcher(config)
        self._decoder = FairDecoder(ImageDecoder(config), config)
        self._capacity = capacity

    def check(self, sources: Sequence[ImageSource], tokenizer: Tokenizer) -> None:
        """Check images before they are loaded.

        Raises:
            FieldError: images_not_supported, too_many_images.
            RequestError: image_too_large, invalid_image: an inline file.
        """
        if not sources:
            return
        where, most = sources[0].where, self._config.max_per_request
        if tokenizer.images is None:
            raise field_error(
                where,
                f": {self._model_name} takes no images here; leave them out, or ask another model",
                code="images_not_supported",
            )
        if len(sources) > most:
            where = sources[most].where
            raise field_error(
                where,
                f"is image {most + 1} of {len(sources)}, and at most {most} are taken "
                "(images.max_per_request); send fewer",
                code="too_many_images",
            )
        for source in sources:
            if not source.url:
                check_file(source.data, self._config, source.where)

    async def load(self, sources: Sequence[ImageSource], tenant: str) -> tuple[ImageInput, ...]:
        """Return the images' files; those named by URL are fetched. `check` comes before.

        Raises:
            RequestError: As `ImageFetcher.fetch`.
            EngineError: overloaded.
        """
        found: list[bytes] = []
        for source in sources:
            data = source.data
            if source.url:
                async with self._capacity.slot(tenant):
                    data = await self._fetcher.fetch(source.url, source.where)
            found.append(data)
        return tuple(ImageInput(data=data) for data in found)

    async def expand(
        self,
        tokenizer: LazyTokenizer,
        text: str,
        images: Sequence[ImageInput],
        tenant: str,
        *,
        add_special: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a text with images, as admission makes them.

        Only the images' sizes are read.

        Args:
            tenant: Tenant of the call.
            add_special: As for `Tokenizer.token_ids`.

        Raises:
            RequestError: invalid_image, image_too_large, image_decode_failed, images_mismatch.
        """
        processor, sizes = await self._sized(tokenizer, images, tenant)
        whole = await self._decoder.run(tenant, partial(processor.expand_text, text, sizes))
        return await tokenizer.token_ids(whole, add_special=add_special)

    async def located(
        self,
        tokenizer: LazyTokenizer,
        token_ids: Sequence[int],
        images: Sequence[ImageInput],
        tenant: str,
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return a prompt of tokens with all tokens of its images, and the offset and length of
        those of each image.

        Args:
            token_ids: As of `ImageProcessor.expand`.

        Raises:
            RequestError: As `expand`.
        """
        processor, sizes = await self._sized(tokenizer, images, tenant)

        def found() -> tuple[tuple[int, ...], list[tuple[int, int]]]:
            expanded = processor.expand(token_ids, sizes)
            return expanded.token_ids, processor.ranges(expanded, sizes)

        return await self._decoder.run(tenant, found)

    async def _sized(
        self, tokenizer: LazyTokenizer, images: Sequence[ImageInput], tenant: str
    ) -> tuple[ImageProcessor, list[Size]]:
        """Return the model's processor, and the images' sizes, which it can take."""
        loaded, config = await tokenizer.required(), self._config
        processor = loaded.images
        assert processor is not None, "check comes before"
        sizes = [
            await self._decoder.size(image.data, f"images[{place}]", tenant)
            for place, image in enumerate(images)
        ]
        limits = {"max_pixels": config.max_pixels, "max_side": config.max_side}
        await self._decoder.run(tenant, partial(processor.check_growth, sizes, **limits))
        return processor, sizes


def unsupported_here(where: str) -> RequestError:
    """Return the refusal of an image where only text is read."""
    return field_error(where, ": images are not supported here; send text", code="unsupported")

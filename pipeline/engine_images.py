"""Images of the engine's requests: PIL images, paths or files, kept until they have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..bus.parts.images import ImagesPlan, PromptMedia
from ..bus.public import GenerateRequest
from ..text.image_tokens import placeholder_id_of
from .engine_requests import ArgumentError, same_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..bus.steps import StepPlan
    from ..stages.admission.arrivals import PromptImage, Tokens
    from ..stages.admission.core import AdmissionCore
    from ..stages.executor.core import ExecutorCore
    from ..store.images import StoredImage
    from ..text.images import ImageProcessor
    from .image_inputs import ImageInputs

_FILE = bytes | bytearray | memoryview


def find_image_processor(
    folder: Path, tokenizer: PreTrainedTokenizerFast | None
) -> ImageProcessor | None:
    """Load the processor of a model's folder; None for a model without images or tokenizer.

    Raises:
        ModelError: The model takes images, and its processor can't be used.
    """
    if tokenizer is None or placeholder_id_of(folder) is None:
        return None
    from ..text.images import ImageProcessor

    return ImageProcessor.of(folder, tokenizer)


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
        # By name.
        self._images: dict[str, StoredImage] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._holders: Counter[str] = Counter()
        # Of requests that are being made; None without images.
        self._given: ImageInputs | None = None

    def _inputs(self) -> ImageInputs:
        if self._given is None:
            from .image_inputs import ImageInputs

            self._given = ImageInputs()
        return self._given

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
                replace(request, images=self._inputs().inputs(own)) if own else request
                for request, own in zip(requests, images_of_all(images, len(requests)), strict=True)
            ]
        finally:
            self._given = None

    def load(self, core: AdmissionCore, request: GenerateRequest) -> tuple[PromptImage, ...]:
        """As `ImageInputs.load`. The images are dropped with `given_to`, unless `add` comes
        before."""
        return self._inputs().load(core, request, self._images)

    def add(self, name: str, tokens: Tokens | None) -> None:
        """Keep the images of a request that is added under this name; None: it has none."""
        media = None if tokens is None else PromptMedia.find(tokens.parts)
        if media is None:
            return
        names = tuple(dict.fromkeys(item.name for item in media.items))
        made = self._inputs().made
        for each in names:
            if each not in self._images:
                self._images[each] = made[each]
        made.clear()
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

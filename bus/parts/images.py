"""Images in prompts: their items, and the embeddings that an executor computes and drops."""

from __future__ import annotations

from typing import ClassVar

from ..media import MediaItem
from ..sections import Section


class PromptMedia(Section, frozen=True):
    """In AdmittedRequest: the images among the prompt's tokens, in order."""

    items: tuple[MediaItem, ...]


class ImagesPlan(Section, frozen=True):
    """In StepPlan.

    Attributes:
        forgotten: Keys of images whose embeddings the executor drops.
        encodes: Images to encode after that, before the pass.
    """

    forgotten: tuple[tuple[str, int], ...] = ()
    encodes: tuple[MediaItem, ...] = ()


class ImagesResult(Section, frozen=True):
    """In StepResult and StepSummary: sequences whose KV is invalid, since an image was missing."""

    for_batching: ClassVar[bool] = True

    spoiled: tuple[int, ...]

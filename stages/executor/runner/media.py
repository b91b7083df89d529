"""Media in prompts: one contract for encoders, and the embeddings that plans name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
from torch import Tensor

from .batch import IntArray

if TYPE_CHECKING:
    from ....bus.media import MediaItem
    from ....store.images import StoredImage

SUPPORTED = frozenset(
    (
        "gemma3",
        "gemma4",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    )
)
"""Kinds of models whose images are served. In others an image may be more than embeddings in place
of tokens, positions, and features that the first layers add."""

LookAhead = Literal["nowhere", "windows", "everywhere"]
"""Layers in which an item's tokens see each other in both directions: none, those with a sliding
window, or all."""

MediaKey = tuple[str, int]
"""`MediaItem.key`."""


class MediaError(Exception):
    """A media item can't be encoded; the message is for the client."""


class Positions(msgspec.Struct, frozen=True):
    """Rotary positions of a prompt with media, where they are not the tokens' indices.

    Attributes:
        prompt: `[3, prompt]`: in time, height and width.
        shift: Number added to the index of a generated token.
    """

    prompt: IntArray
    shift: int


class MediaEncoder(Protocol):
    """Makes embeddings of media of one kind, item by item, so that an embedding's bits don't depend
    on other items.

    Attributes:
        kind: As `MediaItem.kind`.
        looks_ahead: Layers in which an item's tokens see each other in both directions.
        num_deep: Layers of the language model that add features of their own to their outputs at an
            item's places (DeepStack).
    """

    kind: str
    looks_ahead: LookAhead
    num_deep: int

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the processor, for fingerprints."""

    @property
    def rotates_in_space(self) -> bool:
        """Whether an item's tokens have positions in several dimensions."""

    def arguments(self, input_ids: Tensor, places: Tensor, rows: Tensor) -> Mapping[str, Any]:
        """Return the arguments of the model's forward call in place of `input_ids`.

        Args:
            input_ids: `[1, tokens]`.
            places: `[media tokens]`, indices of the tokens of media, rising.
            rows: `[1 + num_deep, media tokens, hidden]`, as from `encode`.
        """

    def encode(self, item: MediaItem, stored: StoredImage) -> Tensor:
        """Return an item's embeddings and the features that layers add,
        `[1 + num_deep, item.num_tokens, hidden]`.

        Raises:
            MediaError: The item has another number of tokens, or can't be processed.
        """

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> Positions | None:
        """Return the positions of a prompt; None if they are its tokens' indices.

        Raises:
            MediaError: The placeholders don't fit the items.
        """


class MediaEmbeddings:
    """The embeddings of media that plans name, until a plan drops them.

    Attributes:
        num_encoded: Items encoded so far.
    """

    def __init__(self, *encoders: MediaEncoder) -> None:
        """Take one encoder for each kind."""
        self._encoders = {encoder.kind: encoder for encoder in encoders}
        self._kept: dict[MediaKey, Tensor] = {}
        self._failures: dict[MediaKey, str] = {}
        self.num_encoded = 0

    def clear(self) -> None:
        """Drop all: the weights have changed, or memory is released."""
        self._kept.clear()
        self._failures.clear()

    def apply(
        self,
        forgotten: Sequence[MediaKey],
        encodes: Sequence[MediaItem],
        stored: Mapping[str, StoredImage],
    ) -> None:
        """Drop embeddings, then encode items. A failure is noted for `of`.

        Args:
            forgotten: Keys to drop.
            encodes: To encode.
            stored: By name, as far as there are any.
        """
        for key in forgotten:
            self._kept.pop(key, None)
            self._failures.pop(key, None)
        for item in encodes:
            try:
                self._kept[item.key] = self._encode(item, stored.get(item.name))
            except MediaError as error:
                self._failures[item.key] = str(error)
            else:
                self.num_encoded += 1

    def of(self, item: MediaItem) -> Tensor:
        """Return an item's embeddings, as `MediaEncoder.encode` does.

        Raises:
            MediaError: It could not be encoded.
            KeyError: No plan has encoded it.
        """
        if (failure := self._failures.get(item.key)) is not None:
            raise MediaError(failure)
        return self._kept[item.key]

    def _encode(self, item: MediaItem, stored: StoredImage | None) -> Tensor:
        if stored is None:
            raise MediaError(f"the {item.kind} is not stored any more; send it again")
        if (encoder := self._encoders.get(item.kind)) is None:
            raise MediaError(f"the model takes no {item.kind}; leave it out")
        return encoder.encode(item, stored)

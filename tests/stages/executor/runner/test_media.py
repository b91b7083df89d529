"""Embeddings of media: each item by the encoder of its kind, kept until a plan drops it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.bus.media import MediaItem
from nano_inference.stages.executor.runner.media import (
    LookAhead,
    MediaEmbeddings,
    MediaError,
    Positions,
)
from nano_inference.store.images import StoredImage

STORED = {"a": StoredImage(2, 2, b""), "b": StoredImage(2, 2, b"")}


class Encoder:
    """Embeddings that name their encoder."""

    looks_ahead: LookAhead = "nowhere"
    num_deep = 0
    rotates_in_space = False
    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, kind: str, value: float) -> None:
        self.kind, self._value = kind, value

    def arguments(self, input_ids: Tensor, places: Tensor, rows: Tensor) -> dict[str, Any]:
        return {"inputs_embeds": rows}

    def encode(self, item: MediaItem, stored: StoredImage) -> Tensor:
        if not item.num_tokens:
            raise MediaError("it has no tokens")
        return torch.full((1, item.num_tokens, 1), self._value)

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> Positions | None:
        return None


def item(name: str, kind: str = "image", num_tokens: int = 2) -> MediaItem:
    return MediaItem(name, 0, num_tokens, 2, 2, name=name, kind=kind)


@pytest.fixture
def embeddings() -> MediaEmbeddings:
    return MediaEmbeddings(Encoder("image", 1.0), Encoder("sound", 2.0))


def test_an_item_is_encoded_by_the_encoder_of_its_kind(embeddings: MediaEmbeddings) -> None:
    items = item("a"), item("b", "sound", 3)
    embeddings.apply((), items, STORED)
    assert [embeddings.of(each).flatten().tolist() for each in items] == [[1, 1], [2, 2, 2]]
    assert embeddings.num_encoded == 2


def test_an_item_is_an_image_unless_it_says_otherwise() -> None:
    assert MediaItem("a", 0, 2, 2, 2).kind == "image"


def test_a_failure_belongs_to_its_item(embeddings: MediaEmbeddings) -> None:
    broken, lost, strange = item("b", num_tokens=0), item("c", "sound"), item("b", "smell", 1)
    embeddings.apply((), (broken, item("a"), lost, strange), STORED)
    assert embeddings.of(item("a")).shape == (1, 2, 1)
    assert embeddings.num_encoded == 1
    for each, message in (
        (broken, "it has no tokens"),
        (lost, "the sound is not stored any more; send it again"),
        (strange, "the model takes no smell; leave it out"),
    ):
        with pytest.raises(MediaError, match=message):
            embeddings.of(each)
    embeddings.apply((broken.key,), (), STORED)
    with pytest.raises(KeyError):
        embeddings.of(broken)


def test_dropped_embeddings_are_gone(embeddings: MediaEmbeddings) -> None:
    embeddings.apply((), (item("a"), item("b")), STORED)
    embeddings.apply((item("a").key,), (), STORED)
    with pytest.raises(KeyError):
        embeddings.of(item("a"))
    embeddings.of(item("b"))
    embeddings.clear()
    with pytest.raises(KeyError):
        embeddings.of(item("b"))

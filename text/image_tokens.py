"""Tokens that stand for images: where they are in a prompt, and whether a model has any."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .model_folder import folder_of, read_json

Size = tuple[int, int]
"""Width and height in pixels."""

_FILES = ("processor_config.json", "preprocessor_config.json")


class ImageTokens(NamedTuple):
    """Where an image is in a prompt.

    Attributes:
        start: Index of its first placeholder token.
        number: Its placeholder tokens, each of which takes one embedding. Other tokens may stand
            between them, where the model cuts an image into tiles.
    """

    start: int
    number: int


class Expanded(NamedTuple):
    """A prompt with all placeholder tokens of its images."""

    token_ids: tuple[int, ...]
    images: tuple[ImageTokens, ...]


def placeholder_id_of(folder: Path) -> int | None:
    """Return the token that a model's image embeddings replace; None for a model without images.

    Raises:
        ModelError: config.json can't be read.
    """
    folder = folder_of(folder)
    config = read_json(folder / "config.json", {})
    if not isinstance(config, dict) or not isinstance(config.get("vision_config"), dict):
        return None
    if not any((folder / name).is_file() for name in _FILES):
        return None
    for name in ("image_token_id", "image_token_index"):
        if isinstance(found := config.get(name), int):
            return found
    return None

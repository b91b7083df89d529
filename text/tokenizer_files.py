"""The files of a tokenizer in a model's folder, by their names."""

from __future__ import annotations

from pathlib import Path

from ..config import ModelError

VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)
TOKENIZER_FILES = (*VOCABULARY_FILES, "tokenizer_config.json")
"""File names of saved tokenizers, supported or not."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has any file of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def check_vocabulary(folder: Path) -> None:
    """Check that the settings of a tokenizer come with a vocabulary.

    Transformers would make a tokenizer without one, which takes every text for no tokens.

    Raises:
        ModelError: They don't.
    """
    settings = folder / "tokenizer_config.json"
    if settings.exists() and not any((folder / name).exists() for name in VOCABULARY_FILES):
        raise no_vocabulary(folder, "only the tokenizer's settings")


def no_vocabulary(folder: Path, has: str) -> ModelError:
    """Return the error for a folder without a whole vocabulary; `has`: what it has."""
    return ModelError(
        f"{folder} holds no tokenizer.json, and {has}; save the model's tokenizer there with "
        "tokenizer.save_pretrained(), or remove tokenizer_config.json to serve token ids only"
    )

"""The context length of a model, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ModelError
from .model_folder import gguf_file_of

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Fields of config.json that hold it, by model type."""

_MOST_CONFIG_BYTES = 1 << 20


def longest_context(text: Mapping[str, Any]) -> int | None:
    """Return the longest context in tokens; None if the configuration doesn't say.

    With some kinds of rotary scaling, positions beyond the original length change the factors of
    the whole batch: one long sequence would change its short neighbours' tokens. The original
    length applies there.

    Args:
        text: The language model's configuration, with Transformers' names.
    """
    told = (text.get(name) for name in _NAMES)
    limit = next((each for each in told if isinstance(each, int) and each > 0), None)
    rope: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    per_kind = [part for part in rope.values() if isinstance(part, dict)]
    for part in per_kind or [rope]:
        if part.get("rope_type", part.get("type")) in ("longrope", "dynamic"):
            name = "original_max_position_embeddings"
            original = part.get(name) or text.get(name)
            limit = min(filter(None, (limit, original)), default=None)
    return limit


def longest_context_of(model: Path) -> int | None:
    """Return the longest context by a model's files, in tokens; None if absent or unreadable.

    Reading a GGUF file's header takes some tenths of a second.
    """
    try:
        if (file := gguf_file_of(model)) is not None:
            from .gguf_header import read_header

            header = read_header(file)
            return longest_context({_NAMES[0]: header.context_length})
        with (model / "config.json").open("rb") as opened:
            config = json.loads(opened.read(_MOST_CONFIG_BYTES))
        return longest_context(config.get("text_config") or config)
    except (ModelError, OSError, ImportError, ValueError, TypeError, AttributeError):
        return None  # loading the model reports the reason

"""Folders of small random vision models with everything that a user's folder has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..stages.executor.vision_models import make_processor, make_vision_model
from ..text.processors import FAMILIES, save_model

_SETTINGS: dict[str, dict[str, Any]] = {
    "llava": {"patch_size": 4},
    "llava_next": {"patch_size": 4},
    "mistral3": {"patch_size": 4},
    "gemma3": {"image_seq_length": 16},
}
"""Settings of processors, by the sizes of the models."""


def save_vision_model(name: str, folder: Path) -> Any:
    """Write a model of a family, with its processor; return Transformers' model in float32."""
    family = FAMILIES[name]
    settings = {**family.settings, **_SETTINGS.get(name, {})}
    tokenizer = save_model(msgspec.structs.replace(family, settings=settings), folder)
    make_processor(name).save_pretrained(folder)
    placeholder = tokenizer.convert_tokens_to_ids(family.placeholder)
    model = make_vision_model(name, placeholder=placeholder, vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    return model

"""Draft heads: one decoder layer that continues a target model's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from .....config import EngineConfig, ModelError
from ..loaded_model import LoadedModel

MTP = "mtp"
"""The `draft_model_path` of the head in the model's own checkpoint."""

HeadLoader = Callable[[EngineConfig, LoadedModel], LoadedModel]


def head_of(config: EngineConfig) -> HeadLoader | None:
    """Return what loads the head of the settings; None if they name a whole draft model.

    Raises:
        ModelError: The model is computed by several ranks.
    """
    found = _loader_of(config)
    if found is not None and config.num_ranks > 1:
        raise ModelError(
            f"a draft head reads the hidden states of one rank, and the model has "
            f"{config.num_ranks}; set tensor_parallel to 1, or draft_model_path to ''"
        )
    return found


def _loader_of(config: EngineConfig) -> HeadLoader | None:
    if config.draft_model_path == MTP:
        from .mtp import load_mtp

        return load_mtp
    folder = replace(config, model_path=config.draft_model_path).model_folder
    if _is_eagle3(folder):
        from .eagle3 import load_eagle3

        return partial(load_eagle3, folder)
    return None


def _is_eagle3(folder: Path) -> bool:
    try:
        fields = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # the load of a whole model says why
        return False
    named = any("eagle3" in str(each).lower() for each in fields.get("architectures") or ())
    return named or "draft_vocab_size" in fields

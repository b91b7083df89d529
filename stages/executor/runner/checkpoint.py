"""Looks at a checkpoint's files before any weight is loaded, so that an error names the file."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ....config import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def check_checkpoint(folder: Path) -> None:
    """Whether every weights file is there and whole, and holds the tensors that the index names.

    Only headers are read. Checkpoints in other formats are left to Transformers.

    Raises:
        ModelError: Something is missing, cut off or can't be read.
    """
    # The order in which Transformers looks for them.
    if (folder / WEIGHTS).is_file():
        _tensor_names(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        _check_shards(folder)


def _check_shards(folder: Path) -> None:
    index = read_index(folder / INDEX)
    by_shard: dict[str, list[str]] = {}
    for tensor, shard in index.items():
        by_shard.setdefault(shard, []).append(tensor)
    for shard, tensors in sorted(by_shard.items()):
        path = folder / shard
        if not path.is_file():
            raise ModelError(
                f"{path} is missing, one of {len(by_shard)} files that {INDEX} names; copy or "
                f"download it again"
            )
        missing = sorted(set(tensors) - _tensor_names(path))
        if missing:
            raise ModelError(
                f"{INDEX} says that {missing[0]} is in {path}, where it is not; the two are not "
                f"of one checkpoint, so copy or download the folder again"
            )


def read_index(path: Path) -> dict[str, str]:
    """The file that each tensor is in. Raises ModelError when the index can't be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ModelError(f"{path} must hold a weight_map from tensors to files")
    return weight_map


def _tensor_names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is cut off or no safetensors file ({error}); copy or download it again"
        ) from error

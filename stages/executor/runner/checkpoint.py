"""A checkpoint's files in safetensors' format, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from ....config import ModelError
from ...read_ahead import INDEX as INDEX
from ...read_ahead import WEIGHTS as WEIGHTS
from ...read_ahead import Index as Index

_CODED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec's decoders."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor; {} for a checkpoint in another format.

    Only headers are read, to check that every file is complete and holds the tensors that the index
    names.

    Raises:
        ModelError: A file is missing, cut off or unreadable.
    """
    # In Transformers' order.
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_tensor_names(folder / WEIGHTS), folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        return {}
    files = {name: folder / file for name, file in _read_index(folder / INDEX).items()}
    paths = sorted({*files.values()})
    for path in paths:
        if not path.is_file():
            raise ModelError(
                f"{path} is missing, one of {len(paths)} files that {INDEX} names; copy or "
                f"download it again"
            )
        held = {*_tensor_names(path)}
        missing = sorted(name for name, file in files.items() if file == path and name not in held)
        if missing:
            raise ModelError(
                f"{INDEX} says that {missing[0]} is in {path}, where it is not; the two are not "
                f"of one checkpoint, so copy or download the folder again"
            )
    return files


def is_coded(name: str) -> bool:
    """Return whether a tensor of this name is a part of a quantised weight."""
    return name.endswith(_CODED)


def tensors_missing(folder: Path, names: Sequence[str]) -> ModelError:
    """Return the error for tensors that a checkpoint lacks."""
    return ModelError(
        f"the weights in {folder} lack {len(names)} tensors that the model needs, such as "
        f"{names[0]}; the checkpoint is incomplete or of another architecture"
    )


def wrong_shape(folder: Path, name: str, shape: Sequence[int], wanted: Sequence[int]) -> ModelError:
    """Return the error for a tensor that doesn't fit the configuration."""
    return ModelError(
        f"{name} in {folder} has the shape {list(shape)} and config.json makes it "
        f"{list(wanted)}; the two are not of one model; copy or download the folder again"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index).weight_map
    except (OSError, *UNREADABLE) as error:
        raise ModelError(
            f"can't read {path}: {error}; it must hold a weight_map from tensors to files"
        ) from error


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is cut off or no safetensors file ({error}); copy or download it again"
        ) from error

"""Weights from a folder on disk, in Transformers' format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ....config import WeightsError


def read_folder(path: str) -> Mapping[str, Tensor]:
    """All tensors of the safetensors files of a folder, or of one file.

    They are read, not mapped: whoever wrote the files may write them again at once.

    Raises:
        WeightsError: There are no such files, or one can't be read.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise WeightsError(f"there is no .safetensors file in {path}; save_pretrained writes one")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load(file.read_bytes())
        except OSError as error:
            raise WeightsError(f"{file} can't be read: {error.strerror}") from None
        except SafetensorError as error:
            raise WeightsError(f"{file} is not a whole safetensors file: {error}") from None
        if twice := tensors.keys() & part.keys():
            raise WeightsError(f"{file} has {min(twice)!r}, which another file has as well")
        tensors |= part
    return tensors

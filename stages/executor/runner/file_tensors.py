"""A checkpoint's tensors, read straight into large pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from .system_memory import HUGE_PAGE, zeros

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def options_of(files: Mapping[str, Path], hf_config: PreTrainedConfig, auto: Any) -> dict[str, Any]:
    """Return arguments for `from_pretrained`; {} for a model that Transformers has to load.

    Such a model's class or dtype depends on the files. Or Transformers joins tensors, such as those
    of experts: it would hold them beside the joined ones, where mapped ones take no memory.

    Args:
        files: The result of `tensor_files`.
        hf_config: The model's configuration.
        auto: The class of Transformers that loads the model.
    """
    if (
        hf_config.get_text_config() is not hf_config
        or hf_config.dtype is None
        or isinstance(auto._model_mapping.get(type(hf_config), ()), tuple)
        or get_checkpoint_conversion_mapping(hf_config.model_type) is not None
    ):
        return {}
    state = file_tensors(files)
    return {"config": hf_config, "state_dict": state} if state else {}


class _Entry(msgspec.Struct):
    """A tensor in the header of a file; the entry of the file's metadata has other fields."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class FileTensor:
    """A tensor that is read into large pages when it is indexed, as Transformers' loader does.

    Copying it from a mapped file takes five times as much processor time, since every page of 4 KiB
    faults.
    """

    def __init__(self, path: Path, start: int, entry: _Entry) -> None:
        self._path, self._start, self._entry = path, start, entry

    def get_dtype(self) -> str:
        """Return its type in the terms of safetensors, as the loader expects."""
        return self._entry.dtype

    def __getitem__(self, _: object) -> Tensor:
        dtype, shape = _DTYPES[self._entry.dtype], self._entry.shape
        size = math.prod(shape)
        if size * dtype.itemsize < HUGE_PAGE:
            flat = torch.empty(size, dtype=dtype)
        else:
            flat = zeros((size,), dtype, torch.device("cpu"), huge=True)
        room = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start)
            while room:
                count = file.readinto(room)
                if not count:
                    raise EOFError(f"{self._path} is cut off")
                room = room[count:]
        return flat.view(shape)


def file_tensors(files: Mapping[str, Path]) -> dict[str, FileTensor]:
    """Return the tensors of `tensor_files`; {} if some are no floats of 16 or 32 bits."""
    found = {}
    for path in {*files.values()}:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = msgspec.json.decode(file.read(size), type=dict[str, _Entry])
        for name, entry in entries.items():
            if files.get(name) == path:
                if entry.dtype not in _DTYPES:
                    return {}
                found[name] = FileTensor(path, 8 + size + entry.data_offsets[0], entry)
    return found

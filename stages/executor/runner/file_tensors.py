"""A checkpoint's tensors, read straight into large pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ...read_ahead import ReadTensor, reading_of

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


class FileTensor:
    """A tensor that is being read; Transformers' loader indexes it.

    Copying it from a mapped file takes five times as much processor time, since every page of 4 KiB
    faults.
    """

    def __init__(self, read: ReadTensor) -> None:
        self._read = read

    def get_dtype(self) -> str:
        """Return its type in the terms of safetensors, as the loader expects."""
        return self._read.dtype

    def __getitem__(self, _: object) -> Tensor:
        read = self._read
        read.done.result()
        dtype = _DTYPES[read.dtype]
        if not read.memory:
            return torch.empty(read.shape, dtype=dtype)
        return torch.frombuffer(read.memory, dtype=dtype).view(read.shape)


def file_tensors(files: Mapping[str, Path]) -> dict[str, FileTensor]:
    """Return the tensors of `tensor_files`; {} if some are no floats of 16 or 32 bits."""
    read = reading_of(files.values()).tensors
    return {name: FileTensor(read[name]) for name in files} if read else {}

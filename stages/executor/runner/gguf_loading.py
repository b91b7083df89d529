"""Loading of GGUF files by Transformers, which unpacks their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ....config import ModelError
from ....text.gguf import require_packages
from ....text.gguf_facts import LINK, facts_of
from .progress import counted_progress


def check_parameters(folder: Path, hf_config: PreTrainedConfig, auto: Any) -> None:
    """Check that a GGUF file has roughly the parameters of the model that its header describes.

    Otherwise missing tensors would be allocated at random before the refusal. If less than half is
    missing, loading names the tensors.
    """
    with torch.device("meta"):
        module: nn.Module = auto.from_config(hf_config)
    wanted = sum(parameter.numel() for parameter in module.parameters())
    facts = facts_of(folder)
    if facts is not None and wanted > 2 * facts.num_parameters:
        raise ModelError(
            f"{facts.file} describes a model of {wanted} parameters, and its tensors have "
            f"{facts.num_parameters}; copy or convert it again"
        )


def options_of(hf_config: PreTrainedConfig) -> dict[str, Any]:
    require_packages()
    try:
        from transformers import GgufConfig
    except ImportError:
        raise ModelError(
            "this version of Transformers is too old for GGUF files; "
            "pip install 'nano-inference[gguf]'"
        ) from None
    # Passing the configuration saves one read of the file's long header.
    return {
        "gguf_file": LINK,
        "config": hf_config,
        "quantization_config": GgufConfig(dequantize=True),
    }


@contextmanager
def progress() -> Iterator[None]:
    """Count the tensors that are loaded, as `counted_progress`.

    Transformers' GGUF loader has a progress bar of its own, without a setting.
    """
    from transformers import modeling_gguf_pytorch_utils

    loader: Any = modeling_gguf_pytorch_utils
    bar, loader.tqdm = loader.tqdm, partial(loader.tqdm, disable=True)
    try:
        with counted_progress():
            yield
    finally:
        loader.tqdm = bar

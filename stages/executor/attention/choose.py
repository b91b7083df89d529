"""Which back end a model gets, once and for all, when it is loaded."""

from __future__ import annotations

from typing import Any

import torch

from ....config import EngineConfig
from ..kernels import cpu
from ..kernels.compile import KernelsUnavailable
from ..loaded_model import LoadedModel
from .backend import AttentionBackend
from .cpu import CpuBackend
from .gather import GatherBackend
from .paged import PagedBackend
from .tiled import TiledBackend


def choose_backend(config: EngineConfig, model: LoadedModel) -> tuple[AttentionBackend[Any], str]:
    """The back end, and why the model runs without our kernels: nothing when it runs with them."""
    if config.deterministic:
        return TiledBackend(config.block_size), "deterministic mode has its own"
    try:
        return _with_kernels(config, model), ""
    except KernelsUnavailable as error:
        return GatherBackend(model, config.block_size), str(error)


def _with_kernels(config: EngineConfig, model: LoadedModel) -> AttentionBackend[Any]:
    """Raises KernelsUnavailable if there are none for this model on this machine."""
    if config.kernels == "off":
        raise KernelsUnavailable("engine.kernels is off")
    if model.device.type == "cuda":
        try:
            from ..kernels.triton_decode import TritonPagedAttention
        except ImportError as error:
            raise KernelsUnavailable(f"Triton can't be imported: {error}") from None
        return PagedBackend(model, config.block_size, TritonPagedAttention)
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        raise KernelsUnavailable(f"there are none for {model.dtype} on {model.device.type}")
    cpu.library()
    if all(cpu.PagedAttention.handles(spec.key_dim, spec.value_dim) for spec in model.layers):
        return CpuBackend(model, config.block_size)
    return GatherBackend(model, config.block_size)

"""The choice of a back end when a model is loaded."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import metadata
from typing import Any

from .....config import EngineConfig, ModelError
from ..kernels import cpu
from ..kernels.compile import SOURCES, KernelsUnavailable
from ..loaded_model import LoadedModel
from .backend import AttentionBackend
from .gather import GatherBackend
from .paged import CpuBackend, PagedBackend


def choose_backend(config: EngineConfig, model: LoadedModel) -> tuple[AttentionBackend[Any], str]:
    """Return the back end, and why the model runs without our kernels; "" if it runs with them.

    Raises:
        ModelError: The back end or tile of the settings is not available.
    """
    backend: AttentionBackend[Any] | None = None
    without_kernels = ""
    try:
        backend = _paged(config, model)
    except KernelsUnavailable as error:
        without_kernels = str(error)
    if backend is None:
        if config.deterministic is True:
            from .tiled import TiledBackend

            backend = TiledBackend(config.block_size)
        else:
            backend = GatherBackend(model, config.block_size)
    if config.attention not in ("auto", backend.name):
        why = without_kernels or "the kernel does not support the width of its heads"
        raise ModelError(
            f"engine.attention is {config.attention!r}, which is not possible for this model: "
            f"{why}; leave it at 'auto'"
        )
    if config.attention_tile and not (backend.name == "paged" and model.device.type == "cuda"):
        raise ModelError(
            f"engine.attention_tile is for 'paged' on CUDA, and this is {backend.name!r} on "
            f"{model.device.type}; leave it at 0"
        )
    return backend, without_kernels


def kernels_of(model: LoadedModel) -> str:
    """Return the language or instructions of a model's kernels."""
    return "Triton" if model.device.type == "cuda" else cpu.instructions(model.dtypes.weights)


def code_of(model: LoadedModel) -> str:
    """Return a digest of the code of a model's kernels, compiled where they are."""
    if model.device.type != "cuda":
        code = cpu.code(model.dtypes.weights)
        return code if model.mixers is None else f"{code}{model.mixers.operators.code}"
    digest = hashlib.sha256(f"triton {metadata.version('triton')}".encode())
    for file in sorted(SOURCES.glob("triton_*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _paged(config: EngineConfig, model: LoadedModel) -> PagedBackend | None:
    """Return the back end with our kernel for attention; None if only the other kernels are used.

    Raises:
        KernelsUnavailable: There are no kernels for this model on this machine.
    """
    if config.kernels == "off":
        raise KernelsUnavailable("engine.kernels is off")
    if model.is_encoder:
        raise KernelsUnavailable("there are none for encoders")
    if model.device.type == "cuda":
        if config.attention == "gather":
            # Recorded steps need the kernel.
            raise KernelsUnavailable("engine.attention is 'gather'")
        try:
            from ..kernels.triton_decode import TritonPagedAttention
        except ImportError as error:
            raise KernelsUnavailable(f"Triton can't be imported: {error}") from None
        if any(spec.is_latent for spec in model.layers):
            # Its tiles hold whole keys, and those of a latent don't fit into shared memory.
            raise KernelsUnavailable("latent attention is gathered on CUDA")
        kernel = partial(TritonPagedAttention, tile=config.attention_tile)
        return PagedBackend(model, config.block_size, kernel)
    if model.device.type != "cpu":
        raise KernelsUnavailable(
            f"there are none for {model.dtypes.weights} on {model.device.type}"
        )
    cpu.library(model.dtypes.weights)
    cpu.sampling_library()
    if any(encoder.looks_ahead != "nowhere" for encoder in model.encoders):
        return None  # the kernel's tokens see none after them
    handled = all(cpu.PagedAttention.handles(spec.key_dim, spec.value_dim) for spec in model.layers)
    if handled and config.attention in ("auto", "paged"):
        return CpuBackend(model, config.block_size)
    return None

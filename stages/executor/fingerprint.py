"""The fingerprint of an executor: what the bits of its results depend on."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import xxhash
from msgspec.structs import replace
from torch import nn

from ...bus.public import Fingerprint
from ...config import EngineConfig
from .runner.attention.choose import code_of, kernels_of
from .runner.interface import ModelRunner
from .runner.loaded_model import LoadedModel

Mode = Literal["on", "without adapters", "off"]

_SETTINGS = (
    "logprobs_mode",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "rank_invariant",
    "attention_tile",
    "latent_attention",
    "kv_dtype",
    "cuda_graphs",
    "ignored_schema_keywords",
    "quantization_ignore",
    "activation_bits",
)
"""Settings of the engine that change numbers and have no field of their own in Fingerprint."""

_SETTINGS_WITHOUT_MODE = (
    "speculation",
    "cache_type",
    "block_size",
    "max_batch_size",
    "max_tokens_per_batch",
)
"""Settings that do so without deterministic mode."""

_SETTINGS_OF_LOGITS = (
    "logprobs_mode",
    "cuda_graphs",
    "ignored_schema_keywords",
    *_SETTINGS_WITHOUT_MODE,
)
"""Settings of these that don't change what the layers compute of a batch."""

_NOT_OF_THE_MODEL = frozenset(("_name_or_path", "_commit_hash", "transformers_version", "dtype"))
"""Fields that say where a configuration comes from; the dtype in use is a field of its own."""

_BYTES_OF_A_TENSOR = 4096


def fingerprint(
    config: EngineConfig, model: LoadedModel, runner: ModelRunner, *, weight_version: int
) -> Fingerprint:
    """Return the fingerprint of an executor that has loaded its model.

    Args:
        config: Its settings.
        model: Its model.
        runner: Its model runner.
        weight_version: Version of the weights in place.
    """
    exact, fast = "deterministic" not in runner.off, runner.fast_modules
    on_cpu, is_whole = model.device.type == "cpu", fast is not None and fast.is_whole
    mode: Mode = "on" if config.deterministic is True else "without adapters"
    names = _SETTINGS if exact else (*_SETTINGS, *_SETTINGS_WITHOUT_MODE)
    with_kernels = "kernels" not in runner.off
    # As it is after JSON, which a recipe is compared with.
    settings, defaults = (
        msgspec.json.decode(msgspec.json.encode(each)) for each in (config, EngineConfig())
    )
    made = Fingerprint(
        package=_version("nano-inference"),
        torch=str(torch.__version__),
        transformers=_version("transformers"),
        machine=cpu_name() if on_cpu else device_name(model.device),
        # Our kernels divide no sum among threads.
        threads=torch.get_num_threads() if on_cpu and not is_whole else 0,
        dtype=str(model.dtypes.weights).removeprefix("torch."),
        quantization=model.forms,
        kernels=kernels_of(model) if with_kernels else "none",
        code=code_of(model) if with_kernels else "",
        attention=runner.backend.name,
        deterministic=mode if exact else "off",
        config=config_digest(model),
        weights=sampled_digest(model.module),
        weight_version=weight_version,
        settings={name: settings[name] for name in names if settings[name] != defaults[name]},
    )
    return replace(made, digest=_digest(made)[:16])


def kv_digest(made: Fingerprint) -> str:
    """Return a digest of what the numbers of an executor's KV depend on, besides the weights.

    Executors with the same digest may exchange KV, and a later start may read it. Without
    deterministic mode the bits depend on the batch, and so threads and sizes of batches are no part
    of it.
    """
    settings = {k: value for k, value in made.settings.items() if k not in _SETTINGS_OF_LOGITS}
    threads = 0 if made.deterministic == "off" else made.threads
    own = replace(made, digest="", weights="", weight_version=0, threads=threads, settings=settings)
    return _digest(own)


def config_digest(model: LoadedModel) -> str:
    """Return a digest of the configuration of a model, and of its image processor."""
    kind = type(model.module)
    # None for a model of text, so that its digest is as before there were several kinds of media.
    encoders = [_own_fields(each.settings) for each in model.encoders] or None
    parts = (
        f"{kind.__module__}.{kind.__qualname__}",
        _own_fields(model.hf_config.to_dict()),
        encoders,
    )
    return _digest(parts)[:16]


def _own_fields(value: Any) -> Any:
    """Return a configuration without the fields of `_NOT_OF_THE_MODEL`, at any depth."""
    if isinstance(value, dict):
        own = {str(key): _own_fields(each) for key, each in value.items()}
        return {key: each for key, each in own.items() if key not in _NOT_OF_THE_MODEL}
    return [_own_fields(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(content: object) -> str:
    encoded = msgspec.json.encode(content, enc_hook=repr, order="sorted")
    return hashlib.sha256(encoded).hexdigest()


def sampled_digest(module: nn.Module) -> str:
    """Return a digest of a model's weights: names, dtypes, shapes, and some numbers of each tensor.

    Up to `_BYTES_OF_A_TENSOR` bytes are read, spread evenly, so that it takes milliseconds for a
    model of any size. Weights that differ nearly everywhere, as after a step of training, have
    different digests; a change of a few numbers can go unnoticed.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() * flat.element_size() // _BYTES_OF_A_TENSOR)
        part = flat[::step].contiguous().cpu()
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()


_version = cache(metadata.version)  # each time it reads and parses a file


@cache
def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU without its number."""
    module: Any = torch.get_device_module(device.type)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
    )

"""LoRA adapters as PEFT saves them: read, and checked against the model.

y = W x + scaling * B A x, where A is `[rank, in]` and B is `[out, rank]` (https://arxiv.org/abs/
2106.09685); scaling is alpha / rank, or with rsLoRA alpha / sqrt(rank)
(https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from .....config import ADAPTER_ID_RULE, AdapterError, WeightsError, is_adapter_id, shown
from ..checkpoint import UNREADABLE
from ..linear.choose import method_of
from ..linear.method import LinearMethod, LoraPair
from ..loaded_model import LoadedModel
from ..weights.checks import LARGEST_VERSION, WeightLimits, check_stored
from ..weights.transports.folder import opened, read_folder, readable, stamp_of
from .adapter import Adapter as Adapter
from .adapter import AdapterLimits as AdapterLimits
from .adapter import rank_of as rank_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_MOST_CONFIG_BYTES = 1 << 20
_WIDEST_BYTES = 8
_MORE_BYTES = 1 << 20

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_PLAIN_PATTERN = re.compile(r"\^?[\w.-]+\$?")
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base weights."""


_UNSUPPORTED = (
    *("modules_to_save", "use_dora", "lora_bias", "target_parameters", "trainable_token_indices"),
    *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config"),
)
"""Fields of adapter_config.json that must be empty."""


class _Config(msgspec.Struct):
    """The fields of adapter_config.json that matter for inference."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


def read_adapter(
    id: str, version: int, folder: str, model: LoadedModel, limits: AdapterLimits
) -> Adapter:
    """Read an adapter from a folder.

    Raises:
        AdapterError: The folder is missing or incomplete, the kind of adapter is not supported, or
            it does not fit the model.
    """
    place = Path(folder).expanduser()
    config = _read_config(place)
    file = str(place / WEIGHTS)
    modules = _linears(model)
    numbers = sum(method.inputs + method.outputs for method in modules.values())
    most = WeightLimits(2 * len(modules) + 16, _WIDEST_BYTES * limits.rank * numbers + _MORE_BYTES)
    try:
        size = os.stat(file).st_size
        if size > most.num_bytes + most.header_bytes:
            raise _too_large(
                f"{shown(file)} has {size} bytes, more than an adapter of rank {limits.rank} "
                "of this model"
            )
        # Before reading: files that are replaced meanwhile will not have this stamp.
        stamp = stamp_of(file)
        tensors = read_folder(file, most)
    except OSError as error:
        raise AdapterError(
            f"{shown(file)} can't be read: {error.strerror}; name a folder that PEFT's "
            "save_pretrained has written, with safetensors"
        ) from None
    except AdapterError:
        raise
    except WeightsError as error:
        raise AdapterError(error.message) from None
    pairs = _pairs_of(tensors, config, model, limits)
    return Adapter(id, version, rank_of(pairs), pairs, str(place), stamp)


def check_adapter_id(id: str, model: str) -> None:
    """Raises AdapterError if the id is invalid or the model's name."""
    if id == model or not is_adapter_id(id):
        raise AdapterError(
            f"{shown(id)} is no valid id of an adapter: {ADAPTER_ID_RULE}, and not the "
            "model's name; choose another",
            code="invalid_adapter_id",
        )


def next_version(id: str, wanted: int | None, last: int) -> int:
    """Return the version of new weights.

    Args:
        id: The adapter.
        wanted: The requested version; None for the next.
        last: The last version of this id.

    Raises:
        AdapterError: The version does not rise.
    """
    if wanted is None:
        return last + 1
    if not last < wanted <= LARGEST_VERSION:
        raise AdapterError(
            f"version {shown(wanted)} of the adapter {shown(id)} is not above its last one, "
            f"{last}, or above {LARGEST_VERSION}; give a larger one, or none"
        )
    return wanted


def stamp_of_adapter(folder: str) -> str:
    """Return a stamp of a folder's adapter, which changes with its files.

    Raises:
        WeightsError: It can't be read.
    """
    return stamp_of(str(Path(folder).expanduser() / WEIGHTS))


def adapter_of(
    id: str,
    version: int,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    model: LoadedModel,
    limits: AdapterLimits,
) -> Adapter:
    """Make an adapter of tensors in this process.

    Args:
        id: Its id.
        version: Version of the adapter's weights.
        tensors: From `peft.get_peft_model_state_dict`.
        config: From the adapter's `LoraConfig.to_dict()`.
        model: The base model.
        limits: Its largest size.

    Raises:
        AdapterError: As `read_adapter`.
    """
    try:
        checked = _checked(config)
    except msgspec.ValidationError as error:
        from .....config.wrong_values import told_of

        raise AdapterError(
            f"in the adapter's config {told_of(error)}", remedy="save the adapter again"
        ) from None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AdapterError(f"{shown(name)} is a {type(tensor).__name__}, not a tensor")
    try:
        check_stored(tensors)
    except WeightsError as error:
        raise AdapterError(error.message) from None
    pairs = _pairs_of(tensors, checked, model, limits)
    return Adapter(id, version, rank_of(pairs), pairs)


# --- the configuration ------------------------------------------------------------------------


def _read_config(folder: Path) -> _Config:
    file = folder / CONFIG
    try:
        with readable(str(file)), opened(file) as descriptor:
            size = os.fstat(descriptor).st_size
            content = os.pread(descriptor, min(size, _MOST_CONFIG_BYTES + 1), 0)
    except WeightsError as error:
        raise AdapterError(f"{error.message}, written by PEFT's save_pretrained") from None
    if len(content) > _MOST_CONFIG_BYTES:
        raise _too_large(f"{shown(str(file))} has {size} bytes, and may have {_MOST_CONFIG_BYTES}")
    try:
        return _checked(msgspec.json.decode(content, type=dict[str, Any]))
    except UNREADABLE as error:
        from .....config.wrong_values import told_of

        raise AdapterError(
            f"{shown(str(file))} can't be used: {told_of(error)}; save the adapter again"
        ) from None


def _checked(fields: Mapping[str, Any]) -> _Config:
    """Return a configuration.

    Raises:
        AdapterError: As `adapter_unsupported`, for all but LoRA on linear layers.
        msgspec.ValidationError: A field has a wrong type.
    """
    known = {name: fields[name] for name in _Config.__struct_fields__ if name in fields}
    config = msgspec.convert(known, _Config, strict=False)
    if config.peft_type != "LORA":
        raise _unsupported(
            f"it is of PEFT's kind {shown(config.peft_type)}, and only LORA is supported"
        )
    initial = config.init_lora_weights
    if isinstance(initial, str) and initial.lower().startswith(_OTHER_BASE):
        raise _unsupported(
            f"init_lora_weights {shown(initial)} is not supported, which changes the base too",
            "save it with path_initial_model_for_weight_conversion",
        )
    if config.bias != "none":
        raise _unsupported(f"bias {shown(config.bias)} is not supported, only 'none'")
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise _unsupported(f"{name} is not supported", f"train it without {name}")
    if not math.isfinite(config.lora_alpha):
        raise AdapterError(f"lora_alpha is {config.lora_alpha}; it must be a number")
    return config


def _of_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first matching key of a pattern.

    PEFT's keys are regular expressions. Nearly all are ends of names, and an arbitrary expression
    could take very long, so others are refused.
    """
    for key, value in (pattern or {}).items():
        plain = key.replace("\\.", ".")
        if not _PLAIN_PATTERN.fullmatch(plain):
            raise _unsupported(
                f"the pattern {shown(key)} in rank_pattern or alpha_pattern is not supported",
                "write the names of the modules, or how they end",
            )
        wanted = plain.removesuffix("$")
        if name == wanted.removeprefix("^") or name.endswith("." + wanted):
            return value
    return default


def _scaling(config: _Config, name: str, rank: int) -> float:
    wanted = _of_pattern(config.rank_pattern, name, config.r)
    if rank != wanted:
        raise AdapterError(
            f"the tensors of {shown(name)} have rank {rank}, and {CONFIG} says {shown(wanted)}"
        )
    alpha = _of_pattern(config.alpha_pattern, name, config.lora_alpha)
    return float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)


# --- the tensors ------------------------------------------------------------------------------


def _pairs_of(
    tensors: Mapping[str, Tensor], config: _Config, model: LoadedModel, limits: AdapterLimits
) -> dict[str, LoraPair]:
    if model.is_encoder:
        # It runs Transformers' own code, with several requests in one pass.
        raise _unsupported("the model is an encoder, and only models with a KV cache take adapters")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _unknown_tensor(name)
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise AdapterError("the adapter has no tensor; save it again")
    whole: Any = model.whole
    modules = _linears(model)
    output = whole.get_output_embeddings()
    pairs = {}
    for name, both in sorted(halves.items()):
        method = modules.get(name)
        if method is None or method.layer is output or "experts" in name.split("."):
            raise _no_such_module(name, whole)
        pairs[name] = _pair(name, both, method, config, model, limits)
    return pairs


@torch.no_grad()
def _pair(
    name: str,
    both: Mapping[str, Tensor],
    method: LinearMethod,
    config: _Config,
    model: LoadedModel,
    limits: AdapterLimits,
) -> LoraPair:
    if both.keys() != {"A", "B"}:
        raise AdapterError(f"{shown(name)} has only lora_{min(both)}; save the adapter again")
    a, b = both["A"], both["B"]
    inputs, outputs = method.inputs, method.outputs
    rank = a.shape[0] if a.dim() == 2 else 0
    if rank < 1 or a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise AdapterError(
            f"the tensors of {shown(name)} are {tuple(a.shape)} and {tuple(b.shape)}; the model "
            f"takes (rank, {inputs}) and ({outputs}, rank)"
        )
    if rank > limits.rank:
        raise _too_large(
            f"the tensors of {shown(name)} have rank {rank}; engine.max_adapter_rank is "
            f"{limits.rank}"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise AdapterError(f"the tensors of {shown(name)} are {a.dtype} and {b.dtype}, not floats")
    scaled = b.float() * _scaling(config, name, rank)
    pair = LoraPair(
        a.detach().to(model.device, model.dtypes.activations, copy=True),
        scaled.t().contiguous().to(model.device, model.dtypes.activations)[None],
    )
    if not all(bool(tensor.isfinite().all()) for tensor in pair):
        raise AdapterError(
            f"the tensors of {shown(name)} have NaN or infinity, in the model's dtype; the trainer "
            "has diverged",
            code="adapter_not_finite",
        )
    return pair


def _linears(model: LoadedModel) -> dict[str, LinearMethod]:
    """Return the linear layers that tokens pass, by name: none of the part that encodes images."""
    tokens_pass = {*model.base.modules()} if model.is_part else None
    return {
        name: method
        for name, part in model.whole.named_modules()
        if (method := method_of(part)) is not None and (tokens_pass is None or part in tokens_pass)
    }


# --- refusals ---------------------------------------------------------------------------------


def _unsupported(what: str, remedy: str = "") -> AdapterError:
    what = f"the adapter can't be served: {what}"
    return AdapterError(what, remedy=remedy, code="adapter_unsupported")


def _too_large(message: str) -> AdapterError:
    return AdapterError(message, code="adapter_too_large")


def _unknown_tensor(name: str) -> AdapterError:
    for part, what in (
        ("lora_embedding_", "LoRA on embeddings is not"),
        ("lora_magnitude_vector", "DoRA is not"),
        (".bias", "a bias of the adapter's own is not"),
        ("modules_to_save", "modules_to_save is not"),
    ):
        if part in name:
            return _unsupported(
                f"{what} supported (the tensor {shown(name)}), only LoRA on linear layers"
            )
    return AdapterError(
        f"the tensor {shown(name)} is unknown; an adapter has lora_A and lora_B of linear layers"
    )


def _no_such_module(name: str, module: nn.Module) -> AdapterError:
    try:
        kind = type(module.get_submodule(name)).__name__
    except AttributeError:
        return AdapterError(
            f"the adapter has tensors for {shown(name)}, which is not in "
            f"{type(module).__name__}; it is for another model"
        )
    return _unsupported(
        f"LoRA on {shown(name)} ({kind}) is not supported, only on linear layers that every token "
        "passes before the output layer"
    )

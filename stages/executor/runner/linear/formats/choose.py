"""The format of a checkpoint, from its quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ......config import ModelError
from .stored import CheckpointFormat, unsupported

_FORMATS = {
    "gptq": ".gptq:GPTQ",
    "awq": ".awq:AWQ",
    "compressed-tensors": ".compressed_tensors:CompressedTensors",
    "fp8": ".fp8:FP8",
    "mxfp8": ".fp8:FP8",
    "fbgemm_fp8": ".fp8:FP8",
    "modelopt": ".fp8:ModelOpt",
    "modelopt_fp4": ".fp8:ModelOpt",
    "mxfp4": ".float4:ExpertBlocks",
}


def format_of(config: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format that a quantization_config describes.

    Raises:
        ModelError: It isn't read here, or a field has a wrong type or value.
    """
    method = config.get("quant_method")
    if not isinstance(method, str):
        raise ModelError(
            "quantization_config in config.json has no quant_method; copy the checkpoint again, or "
            "take the section out if its weights are not quantised"
        )
    if method in ("auto-round", "intel/auto-round"):
        method, config = _of_auto_round(config)
    if method not in _FORMATS:
        raise unsupported(f"quantization_config in config.json: quant_method {method!r}")
    file, _, name = _FORMATS[method].partition(":")
    found: CheckpointFormat = getattr(import_module(file, __package__), name)(config)
    return found


def _of_auto_round(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return AutoRound's configuration as that of the format whose layout its tensors have."""
    layout = config.get("packing_format") or config.get("backend") or "auto_round:exllamav2"
    name = str(layout).lower()
    # Its own layout is GPTQ's without the subtraction from zero points.
    subtracts = "gptq" in name and "gptqmodel" not in name
    own = {**config, "checkpoint_format": "gptq" if subtracts else "gptq_v2"}
    changes = config.get("extra_config") or {}
    if not isinstance(changes, Mapping):
        raise ModelError("quantization_config in config.json: extra_config must be an object")
    for field, plain in (("data_type", "int"), ("rotation_config", None), ("act_bits", 16)):
        if (config.get(field) or plain) != plain:
            raise unsupported(
                f"quantization_config in config.json: AutoRound's {field} {config[field]!r}"
            )
    if "awq" in name:
        return "awq", own
    own["dynamic"] = {f"(?:{each})$": fields for each, fields in changes.items()}
    return "gptq", own

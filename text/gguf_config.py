"""Fields of a configuration that Transformers' loader doesn't take from a GGUF header.

It reads a short list of keys for each architecture; for others its configurations have defaults,
which are those of one model. Here is what other models of these architectures have.
"""

from __future__ import annotations

from typing import Any

from .gguf_header import GgufHeader

_KEYS = {
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_eps": "attention.layer_norm_epsilon",
}
"""GGUF's keys by the fields that they are for, where a configuration has such a field."""

_GEMMAS = ("gemma2", "gemma3_text")
_WIDE_GEMMA_HEAD = 128


def complete(hf_config: Any, header: GgufHeader) -> None:
    """Set the fields of a configuration that follow from its GGUF header.

    Args:
        hf_config: As Transformers' loader makes it.
        header: Header of the file.
    """
    if hf_config.model_type.startswith("gemma4"):
        return  # its keys are for one of two kinds of layers
    for field, key in _KEYS.items():
        value = _value(header, key)
        if value is not None and hasattr(hf_config, field):
            setattr(hf_config, field, value or None)  # llama.cpp: 0 is off
    if hf_config.model_type == "mistral" and _value(header, _KEYS["sliding_window"]) is None:
        hf_config.sliding_window = None  # the default is that of the first version
    _complete_rotary(hf_config, header)
    if hf_config.model_type in _GEMMAS:
        hf_config.query_pre_attn_scalar = _gemma_scalar(hf_config, header)


def _complete_rotary(hf_config: Any, header: GgufHeader) -> None:
    rotary = getattr(hf_config, "rope_parameters", None)
    if not isinstance(rotary, dict) or "rope_theta" not in rotary:
        return  # Gemma 3 has one for each kind of layers
    if (theta := _value(header, "rope.freq_base")) is not None:
        rotary["rope_theta"] = theta
    width = getattr(hf_config, "head_dim", None)
    width = width or hf_config.hidden_size // hf_config.num_attention_heads
    turned = _value(header, "rope.dimension_count")
    if turned is not None and "partial_rotary_factor" in rotary:
        rotary["partial_rotary_factor"] = turned / width


def _gemma_scalar(hf_config: Any, header: GgufHeader) -> int:
    """Return the number whose inverse square root scales a Gemma's attention.

    It is in no GGUF file. The models of 27B, the only ones with heads of 128, scale by the width of
    the model over the heads (144 in Gemma 2, 168 in Gemma 3), all others by the width of a head.
    """
    if scale := _value(header, "attention.scale"):
        scalar: int = round(scale**-2)
        return scalar
    width: int = hf_config.head_dim
    if width == _WIDE_GEMMA_HEAD:
        width = hf_config.hidden_size // hf_config.num_attention_heads
    return width


def _value(header: GgufHeader, key: str) -> Any:
    return header.metadata.get(f"{header.architecture}.{key}")

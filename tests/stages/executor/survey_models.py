"""Tiny random models of every decoder-only kind that Transformers has, made by one rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCAB = 211
MAX_LEN = 256

_WIDTHS = {
    64: "hidden_size d_model n_embd embedding_dim attention_hidden_size lru_width embedding_size "
    "mamba_d_ssm emb_dim word_embed_proj_dim input_embedding_size output_embedding_size "
    "cross_attention_hidden_size dense_intermediate_size out_hidden_size projection_dim",
    16: "head_dim attention_head_dim d_head dim_head kv_channels attention_head_size swa_head_dim "
    "global_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank o_lora_rank "
    "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim mamba_d_state ssm_state_size state_size index_head_dim laurel_rank hc_lowrank "
    "hidden_size_per_layer_input ple_embed_dim gated_norm_rank router_hidden_size adapter_rank "
    "query_pre_attn_scalar head_size",
    8: "sliding_window sliding_window_size attention_window_size window_size local_attention "
    "local_attention_window_len attention_chunk_size floor_scale log_scaling_n_floor rotary_dim "
    "index_topk keep_window_size mamba_dt_rank time_step_rank d_rel mamba_n_heads n_mamba_heads "
    "qk_rope_head_dim chunk_size mamba_chunk_size block_size",
    32: "index_n_heads",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "swa_num_attention_heads linear_num_value_heads linear_num_heads "
    "num_query_groups mamba_num_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts zero_expert_num index_block_size",
    2: "num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads "
    "linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts "
    "index_topk_blocks n_shared_experts n_groups mamba_n_groups o_groups",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers "
    "moe_layer_start_index",
    MAX_LEN: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length "
    "context_length ",
    1000: "ngram_vocab_size_base ngram_head_vocab_size",
}
_SIZES = {name: size for size, names in _WIDTHS.items() for name in names.split()}
"""The largest value of each setting."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_INNER = ("intermediate", "ffn", "dff", "dim_ff", "feed_forward", "mlp_hidden")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_MOST_LAYERS = 6


_IF_UNSET = {"head_dim": 16, "num_key_value_heads": 2}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_SHORT_MROPE = {**_ROPE, "mrope_section": [1, 1, 2]}
_PARTIAL_MROPE = {"rope_parameters": {**_SHORT_MROPE, "partial_rotary_factor": 0.5}}
_SHARED_KV = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}

_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "cosmos3_edge_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "emu3": {"pad_token_id": 0},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "gemma3n_text": {
        **_SHARED_KV,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        "intermediate_size": [64] * 6,
    },
    "gemma4_text": {**_SHARED_KV, "num_kv_shared_layers": 0},
    "glm4v_text": _PARTIAL_MROPE,
    "glm4v_moe_text": _PARTIAL_MROPE,
    "glm_ocr_text": _PARTIAL_MROPE,
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_d_head": 16,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {"pad_token_id": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
}
"""Settings of those kinds that the rule does not make, by `model_type` of the part."""


_SPARSE = "minimax_m3_sparse"
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4_text, shared KV": {"gemma4_text": {"num_kv_shared_layers": 2}},
    "granitemoehybrid, attention alone": {"granitemoehybrid": {"layer_types": ["attention"] * 3}},
    "llama4_text, shorter than a chunk": {
        "llama4_text": {"attention_chunk_size": 4096, "floor_scale": 8192}
    },
    "minimax_m3_vl_text, sparse attention": {
        "minimax_m3_vl_text": {"layer_types": ["full_attention", _SPARSE, _SPARSE]}
    },
}
"""Kinds with other layers than by default, and settings by `model_type` of the part."""


def names() -> list[str]:
    """All kinds of models that may be decoder-only, by `model_type`, and variants of them."""
    kinds = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted([*kinds, *VARIANTS])


def small_config(name: str) -> PreTrainedConfig:
    """The configuration of a tiny model of this kind or variant, by its class's defaults."""
    default = CONFIG_MAPPING[name.partition(",")[0]]()
    return _smaller(default, VARIANTS.get(name, {}), is_text=True)


def small_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A random model in float32 with Transformers' eager attention."""
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int = 0) -> None:
    """Draw the weights, large enough for greedy choices to be clear."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight.mul_(2.0)


def _smaller(
    config: PreTrainedConfig, own: dict[str, dict[str, Any]], *, is_text: bool
) -> PreTrainedConfig:
    changes: dict[str, Any] = {}
    text = config.get_text_config()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _smaller(value, own, is_text=value is text)
        elif name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value > 0:
                changes[name] = _TOKENS.get(name, VOCAB - 1 - len(changes) % 9)
        elif isinstance(value, int) and not isinstance(value, bool):
            if name.startswith("vocab_size") or name == "unpadded_vocab_size":
                changes[name] = VOCAB
            elif name in _SIZES:
                changes[name] = min(value, _SIZES[name])
            elif name in _DEPTHS:
                continue
            elif value > 64 and any(part in name for part in _INNER):
                changes[name] = 64
    if "kv_lora_rank" in changes:
        # Every head has keys of its own, and `head_dim` is the rotary part's.
        changes |= {"num_key_value_heads": changes["num_attention_heads"], "head_dim": 8}
    if is_text and hasattr(config, "is_decoder"):
        changes["is_decoder"] = True
    for name, size in _IF_UNSET.items():
        if is_text and vars(config).get(name, size) is None:
            changes[name] = size
    changes |= _fewer_layers(config) if is_text else _shallow(config)
    changes |= _EXCEPTIONS.get(config.model_type, {}) | own.get(config.model_type, {})
    return type(config)(**changes)


def _fewer_layers(config: Any) -> dict[str, Any]:
    """One layer of each kind at least, in their order, and three in all."""
    depth = next((name for name in _DEPTHS if isinstance(getattr(config, name, None), int)), None)
    if depth is None:
        return {}
    count: int = getattr(config, depth)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count
    }
    kinds = [*zip(*lists.values(), strict=True)] or [()] * count
    first = {str(kind): place for place, kind in reversed([*enumerate(kinds)])}
    chosen = sorted(first.values())[:_MOST_LAYERS]
    others = (place for place in range(count) if place not in chosen)
    while len(chosen) < min(3, count):
        chosen = sorted([*chosen, next(others)])
    return {
        depth: len(chosen),
        **{name: [value[place] for place in chosen] for name, value in lists.items()},
    }


def _shallow(config: Any) -> dict[str, Any]:
    names = (*_DEPTHS, "depth", "num_blocks", "encoder_layers", "layers")
    return {name: 1 for name in names if isinstance(getattr(config, name, None), int)}

"""Small random models of the architectures that we list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import load_model

VOCAB = 211

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_MIXED_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

_SHARED = {
    "num_hidden_layers": 5,
    "layer_types": [*_MIXED_WINDOWS, "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
}

_MOE = {"num_experts_per_tok": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_window": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": _MIXED_WINDOWS,
    },
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {
        "sliding_window": 8,
        "layer_types": _MIXED_WINDOWS,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"sliding_window": 8, "layer_types": _MIXED_WINDOWS},
    "phi3": {"sliding_window": 11, "num_key_value_heads": 4, "hidden_size": 64},
    "olmo2": {"num_key_value_heads": 1},
    "mixtral": {"num_local_experts": 4, **_MOE},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": _MIXED_WINDOWS, **_MOE},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **_MOE},
    "llama4_text": {
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 0],
        "floor_scale": 5,
        "attn_scale": 0.3,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
    },
    "gemma3n_text": {
        **_SHARED,
        "intermediate_size": [64] * 5,
        "activation_sparsity_pattern": [0.5, 0.0, 0.3, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_SHARED,
        "use_double_wide_mlp": True,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}

ARCHITECTURES = tuple(OVERRIDES)

_OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "index_topk": 8,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        **_MOE,
    },
}
"""Models that tests of one part use."""

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    **_MOE,
}

LATENT: dict[str, dict[str, Any]] = {
    # Widths of which no vector is full.
    "deepseek_v2": {**_LATENT, "qk_nope_head_dim": 12, "v_head_dim": 20, "q_lora_rank": None},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": {**_LATENT, "v_head_dim": 32},
    "minicpm3": {**_LATENT, "qk_rope_head_dim": 8},
    "longcat_flash": {**_LATENT, "num_layers": 2, "ffn_hidden_size": 64, "moe_topk": 2},
}
"""Models with multi-head latent attention."""

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    "layer_types": _LINEAR,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, **_MOE}
_NARROW_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_KIMI = {"layer_types": _LINEAR, "linear_num_heads": 2, "linear_head_dim": 12, **_NARROW_LATENT}
_MAMBA_2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_ZAMBA = {"num_hidden_layers": 5, "attention_head_dim": 24, "attention_hidden_size": 96}

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, "num_dense_layers": 1, **_EXPERTS},
    "lfm3": {},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "kimi_linear": {**_KIMI, "num_local_experts": 4, "moe_intermediate_size": 32, **_MOE},
    "bailing_hybrid": {**_KIMI, **_EXPERTS, "n_group": 1, "topk_group": 1},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        **_MOE,
    },
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 96},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        **_MOE,
    },
    "zamba2": {
        **_ZAMBA,
        "mamba_d_state": 8,
        "n_mamba_heads": 6,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
    },
    "mamba2": {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "zamba": {
        **_ZAMBA,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "zaya": {"num_experts": 4},
    "minimax": {"layer_types": _LINEAR, "num_local_experts": 4, "block_size": 16, **_MOE},
}
"""Models with recurrent state."""

_ENCODER_DECODER = "is an encoder-decoder model"
_NOT_CAUSAL = "is not a causal language model"
_STATEFUL = "has recurrent layers of a kind that is not known here"
_NO_INTERFACE = "does not use Transformers' attention interface (_supports_attention_backend)"

REFUSED = {
    **dict.fromkeys(("t5", "bart", "marian", "whisper"), _ENCODER_DECODER),
    **dict.fromkeys(("vit", "clip"), _NOT_CAUSAL),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), _STATEFUL),
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"), _NO_INTERFACE),
    **dict.fromkeys(("stablelm", "xlnet"), _NO_INTERFACE),
}
"""Kinds of models that are refused at load, and a part of the error's sentence."""

_REFUSED_ONCE_BUILT: dict[str, dict[str, Any]] = {}
"""Those of which only the model tells, not the class, and settings that make it small."""


def make_refused(kind: str) -> tuple[PreTrainedConfig, Any]:
    """A configuration of a kind in REFUSED; and a model, where only the model tells."""
    if kind not in _REFUSED_ONCE_BUILT:
        return CONFIG_MAPPING[kind](), None
    config = CONFIG_MAPPING[kind](**{**_COMMON, **_REFUSED_ONCE_BUILT[kind]})
    return config, AutoModelForCausalLM.from_config(config)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model as Transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def load(folder: Path, **settings: Any) -> Any:
    """Load the model of a folder or file, on the CPU unless a setting says otherwise."""
    return load_model(EngineConfig(model_path=str(folder), **{"device": "cpu", **settings}))


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a small model; `name` is a key of these tables, or a kind of model."""
    kind = name.removesuffix("_window")
    own = {**OVERRIDES, **RECURRENT, **LATENT, **_OTHERS}.get(name, {})
    return CONFIG_MAPPING[kind](**{**_COMMON, **own, **changes})


def make_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model in float32 whose logits are far enough apart for greedy choices to be clear.

    Its attention is Transformers' own eager one.
    """
    torch.manual_seed(seed)
    config = make_config(name, **changes)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale * 1.5)
        _spread_output(model)
    return model


def _spread_output(model: Any) -> None:
    output: nn.Linear = model.get_output_embeddings()
    output.weight.mul_(2.0)

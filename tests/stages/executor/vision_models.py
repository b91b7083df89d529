"""Small random models that take images, each with an image processor, and prompts for them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

VOCAB = 131
PLACEHOLDER, START, END, TILE = 125, 126, 127, 128
"""Tokens of images: in place of an embedding, before and after an image, before a tile."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "num_position_embeddings": 16,
}
_GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_VISION = {
    **_VISION,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
_NO_AUDIO = {"audio_config": None, "audio_token_id": 129, "video_token_id": 130}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GLM_VISION = {
    **_QWEN_VISION,
    "hidden_size": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "image_size": 16,
}
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_M_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SQUARE = {"height": 16, "width": 16}
_GRID = [[16, 16], [16, 32], [32, 16], [32, 32]]

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {
            **_QWEN_VISION,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "num_hidden_layers": 3, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR, "rope_parameters": _M_ROPE},
        "vision_config": _QWEN3_VISION,
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_LINEAR, **_EXPERTS, "rope_parameters": _M_ROPE},
        "vision_config": _QWEN3_VISION,
    },
    "glm4v": {
        "text_config": {**_TEXT, "rope_parameters": _M_ROPE},
        "vision_config": _GLM_VISION,
    },
    "glm4v_moe": {
        "text_config": {
            **_TEXT,
            **_MOE,
            "rope_parameters": {**_M_ROPE, "partial_rotary_factor": 0.5},
        },
        "vision_config": _GLM_VISION,
    },
    "glm46v": {
        "text_config": {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _M_ROPE},
        "vision_config": {**_GLM_VISION, "model_type": "glm4v_vision"},
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "rope_parameters": _M_ROPE,
        },
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        "image_grid_pinpoints": _GRID,
    },
    "llava_next": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_grid_pinpoints": _GRID,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 32, "head_dim": 8},
        "spatial_merge_size": 2,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
        },
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 16,
    },
    "gemma4": {
        "text_config": {**_TEXT, **_GEMMA4, "use_bidirectional_attention": "vision"},
        "vision_config": _GEMMA4_VISION,
        **_NO_AUDIO,
    },
    "gemma4-causal": {
        "text_config": {
            **_TEXT,
            **_GEMMA4,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
        "vision_config": _GEMMA4_VISION,
        **_NO_AUDIO,
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "scale_factor": 2,
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "internvl_vision"},
        "image_seq_length": 4,
    },
}

ARCHITECTURES = tuple(_CONFIGS)

_PROCESSORS: dict[str, Any] = {
    "qwen2_vl": lambda: Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}
    ),
    "glm4v": lambda: Glm4vImageProcessorPil(
        patch_size=4, size={"shortest_edge": 128, "longest_edge": 2048}
    ),
    "glm46v": lambda: Glm46VImageProcessorPil(
        patch_size=4, size={"shortest_edge": 128, "longest_edge": 2048}
    ),
    "llava": lambda: LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=_SQUARE),
    "llava_onevision": lambda: LlavaOnevisionImageProcessorPil(
        size=_SQUARE, image_grid_pinpoints=_GRID
    ),
    "llava_next": lambda: LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size=_SQUARE, image_grid_pinpoints=_GRID
    ),
    "mistral3": lambda: PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size=8),
    "gemma3": lambda: Gemma3ImageProcessorPil(size=_SQUARE),
    "gemma4": lambda: Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    ),
    "smolvlm": lambda: SmolVLMImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    ),
    "idefics3": lambda: Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    ),
    "internvl": lambda: GotOcr2ImageProcessorPil(size=_SQUARE, min_patches=1, max_patches=4),
}
_PROCESSORS |= dict.fromkeys(
    ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _PROCESSORS["qwen2_vl"]
)
_PROCESSORS["gemma4-causal"] = _PROCESSORS["gemma4"]
_PROCESSORS["glm4v_moe"] = _PROCESSORS["glm4v"]


def make_processor(name: str) -> Any:
    """The image processor of an architecture."""
    return _PROCESSORS[name]()


def make_vision_model(
    name: str,
    *,
    seed: int = 0,
    placeholder: int = PLACEHOLDER,
    vision: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A random model in float32 whose greedy choices are clear, with eager attention.

    Args:
        name: The architecture.
        seed: Seed of the weights.
        placeholder: The token in place of an embedding.
        vision: Changes of the vision part's configuration.
        changes: Changes to the language part's settings.
    """
    torch.manual_seed(seed)
    token = "image_token_index" if name.startswith("llava") else "image_token_id"
    settings = copy.deepcopy(_CONFIGS[name])
    settings["text_config"] |= changes
    settings["vision_config"] |= vision or {}
    if "rope_parameters" in settings["text_config"]:
        rope = settings["text_config"]["rope_parameters"]
        pairs = int(settings["text_config"]["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        first = pairs // 4
        second = (pairs - first) // 2
        rope["mrope_section"] = [first, second, pairs - first - second]
    config = CONFIG_MAPPING[name.partition("-")[0]](**settings, **{token: placeholder})
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key or "ln_" in key:
                parameter.add_(noise * 0.2)
            else:
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
                parameter.copy_(noise * fan_in**-0.5 * 1.5)
        output: nn.Linear = model.get_output_embeddings()
        output.weight.mul_(2.0)
    return model


def picture(seed: int, width: int = 24, height: int = 16) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A random picture, `[height, width, 3]`."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return np.kron(coarse, np.ones((4, 4, 1), np.uint8))

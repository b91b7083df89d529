"""Folders of vision models, without weights: settings, and the processor of each family with the
tokenizer of the bundled model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nano_inference.config import EngineConfig


class Family(msgspec.Struct, frozen=True):
    """A family of vision models.

    Attributes:
        processor: Class of the processor; `settings` are its own, `image_settings` those of its
            image processor, of the class `image_processor`.
        named: Special tokens by the names that the processor reads; `placeholder` is the token of
            embeddings.
        others: More special tokens.
    """

    model_type: str
    processor: str
    image_processor: str
    placeholder: str
    named: dict[str, str] = {}
    others: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    image_settings: dict[str, Any] = {}


_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
_TILES = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
_FAKE = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_SPLIT = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}

FAMILIES = {
    "qwen2_vl": Family(
        "qwen2_vl",
        "Qwen2VLProcessor",
        "Qwen2VLImageProcessorPil",
        "<|image_pad|>",
        others=_QWEN,
        image_settings={"size": {"shortest_edge": 28 * 28, "longest_edge": 40_000}},
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessorPil",
        "<|image_pad|>",
        others=_QWEN,
        image_settings={"size": {"shortest_edge": 28 * 28, "longest_edge": 40_000}},
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        "<|image_pad|>",
        others=_QWEN,
        image_settings={
            "patch_size": 16,
            "size": {"shortest_edge": 32 * 32, "longest_edge": 40_000},
        },
    ),
    "glm4v": Family(
        "glm4v",
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        "<|image|>",
        others=_GLM,
        image_settings={"size": {"shortest_edge": 28 * 28, "longest_edge": 80_000}},
    ),
    "glm46v": Family(
        "glm46v",
        "Glm46VProcessor",
        "Glm46VImageProcessorPil",
        "<|image|>",
        others=_GLM,
        image_settings={"size": {"shortest_edge": 28 * 28, "longest_edge": 80_000}},
    ),
    "llava": Family(
        "llava",
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        "<image>",
        others=("<image>",),
        settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        image_settings={
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
    ),
    "llava_next": Family(
        "llava_next",
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        "<image>",
        others=("<image>",),
        settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        image_settings={
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32]],
        },
    ),
    "llava_onevision": Family(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessorPil",
        "<image>",
        others=("<image>", "<video>"),
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        image_settings={
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32]],
        },
    ),
    "mistral3": Family(
        "mistral3",
        "PixtralProcessor",
        "PixtralImageProcessorPil",
        "[IMG]",
        others=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        settings={"patch_size": 8, "spatial_merge_size": 2},
        image_settings={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        "<image_soft_token>",
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        settings={"image_seq_length": 4},
        image_settings={"size": {"height": 32, "width": 32}},
    ),
    "gemma4": Family(
        "gemma4",
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        "<|image|>",
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        image_settings={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    ),
    "idefics3": Family(
        "idefics3",
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        "<image>",
        others=(*_FAKE, *_TILES),
        settings={"image_seq_len": 4},
        image_settings=_SPLIT,
    ),
    "smolvlm": Family(
        "smolvlm",
        "SmolVLMProcessor",
        "SmolVLMImageProcessorPil",
        "<image>",
        others=(*_FAKE, *_TILES),
        settings={"image_seq_len": 4},
        image_settings=_SPLIT,
    ),
    "internvl": Family(
        "internvl",
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        "<IMG_CONTEXT>",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        settings={"image_seq_length": 4},
        image_settings={"size": {"height": 32, "width": 32}, "max_patches": 6},
    ),
}


def save_model(family: Family, folder: Path) -> PreTrainedTokenizerFast:
    """Write settings, processor and tokenizer of a model; return the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(
        str(EngineConfig().model_folder), extra_special_tokens=dict(family.named)
    )
    missing = [each for each in family.others if each not in tokenizer.get_vocab()]
    tokenizer.add_tokens(missing, special_tokens=True)
    tokenizer.save_pretrained(folder)
    kind: Callable[..., Any] = getattr(transformers, family.image_processor)
    kind(**family.image_settings).save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": family.processor, **family.settings})
    )
    config = {
        "model_type": family.model_type,
        "image_token_id": tokenizer.convert_tokens_to_ids(family.placeholder),
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer

"""Requests of every kind that the bus has, and their model, settings and adapter."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import chaos
import torch
from PIL import Image
from safetensors.torch import save_file

MODEL = "tiny-vision"
LAYERS, HIDDEN, KEY_WIDTH = 4, 128, 64
ADAPTER = "poet"
SETTINGS: dict[str, object] = {
    **chaos.SETTINGS,
    "engine.model_path": MODEL,
    "engine.deterministic": True,
    "engine.max_model_len": 512,
}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = f'start: "<tool_call>" call "</tool_call>"\ncall: %json {json.dumps(PERSON)}'


# --- requests -----------------------------------------------------------------------------------


def picture(rng: random.Random) -> str:
    """Return a PNG with a few coloured squares, as base64."""
    image = Image.new("RGB", (48, 48), rng.choice(("white", "black", "grey")))
    for _ in range(3):
        place = rng.randrange(40), rng.randrange(40)
        image.paste(rng.choice(("red", "green", "blue")), (*place, place[0] + 8, place[1] + 8))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def with_schema(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"json_schema": PERSON}, "ignore_eos": False}


def with_tool(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"lark": CALL}, "ignore_eos": False}


def with_regex(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"regex": "([a-z]{2,9} [0-9]+, )+"}}
    request["sampling"]["ignore_eos"] = False


def with_adapter(request: dict[str, Any], rng: random.Random) -> None:
    request["model"] = ADAPTER


def with_logprobs(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"logprobs": rng.randint(1, 5), "prompt_logprobs": rng.randint(0, 2)}


def with_images(request: dict[str, Any], rng: random.Random) -> None:
    request["images"] = [{"data": picture(rng)}]
    request["prompt"] = f"<image>{request['prompt'][:60]}"


def as_embedding(request: dict[str, Any], rng: random.Random) -> None:
    request |= {"embed": {"dimensions": rng.choice((16, 128))}, "n": 1, "stream": False}
    del request["sampling"]


def with_penalties(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"repetition_penalty": 1.1, "presence_penalty": 0.3, "min_tokens": 4}


def plain(request: dict[str, Any], rng: random.Random) -> None:
    pass


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter with random matrices, in PEFT's format."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", KEY_WIDTH)):
            module = f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
            first = torch.randn(4, HIDDEN, generator=generator) / 8
            tensors[f"{module}.lora_A.weight"] = first
            tensors[f"{module}.lora_B.weight"] = torch.randn(width, 4, generator=generator) / 8
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))

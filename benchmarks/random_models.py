"""Models of random weights, in the shapes of `workloads.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from workloads import SHAPES

TWO_LAYERS = SHAPES["S"] | {"num_hidden_layers": 2, "vocab_size": 32_768}
"""Of Qwen2.5-0.5B, with a vocabulary so small that the output layer does not hide the rest."""


def random_model(
    shape: dict[str, Any], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Any:
    """A Transformers model without gradients; `shape` is what Qwen2Config takes."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def write_model(folder: Path, shape: str) -> None:
    """Writes a model in bfloat16, with a tokenizer of one token per id."""
    settings = SHAPES[shape] | {
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    random_model(settings, torch.float32).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {f"t{number}": number for number in range(settings["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0")
    fast.save_pretrained(folder)

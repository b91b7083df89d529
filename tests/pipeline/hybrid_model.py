"""A random model of two layers, one with recurrent state (Gated DeltaNet) and one with attention,
with the bundled model's tokenizer: for tests of what is kept of a sequence beside its KV."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from . import reference

VOCAB = 768


@cache
def folder(seed: int = 0) -> Path:
    """Gone when this process ends. `seed`: of the weights."""
    parent = tempfile.mkdtemp(prefix="nano-hybrid-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    made = Path(parent) / reference.FOLDER.name
    weights = shutil.ignore_patterns("model.safetensors", "config.json")
    shutil.copytree(reference.FOLDER, made, ignore=weights)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        max_position_embeddings=2048,
        eos_token_id=0,
        pad_token_id=3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                scale = 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        model.get_output_embeddings().weight.mul_(2.0)
    model.save_pretrained(made)
    return made

"""GGUF files of models that tests have: the bundled one, and those of Llama's and Qwen2's kind."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from nano_inference.config import EngineConfig

TINY = EngineConfig().model_folder

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

Change = Callable[[gguf.GGUFWriter], object]


def nothing(writer: gguf.GGUFWriter) -> None:
    pass


def random_rows(kind: str, rows: int, columns: int, size: float = 0.02, seed: int = 0) -> Any:
    """Return `[rows, bytes]` uint8: blocks of a quantised type, with every code.

    The package quantises to some types only. So codes are random bytes, and each block's factors
    are such that weights have a standard deviation of about `size`.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    numbers = np.random.default_rng(seed)
    blocks = numbers.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    for place, deviation in _FACTORS[kind].items():
        factors = size / deviation * numbers.uniform(0.8, 1.2, len(blocks))
        blocks[:, place : place + 2] = factors.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


_FACTORS: dict[str, dict[int, float]] = {
    "Q8_0": {0: 74},
    "Q4_0": {0: 4.6},
    "Q4_1": {0: 4.6, 2: -0.61},
    "Q5_0": {0: 9.2},
    "Q5_1": {0: 9.2, 2: -0.6},
    "Q2_K": {80: 13.9, 82: 9.3},
    "Q3_K": {108: 42},
    "Q4_K": {0: 255, 2: 34},
    "Q5_K": {0: 520, 2: 33.5},
    "Q6_K": {208: 1360},
    "IQ4_NL": {0: 68},
    "IQ4_XS": {0: 1260},
}
"""The places of a block's factors, and the deviation of weights over each factor: weights have a
mean of about 0."""


def tiny_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The bundled model's, as llama.cpp's converter would write it."""
    content: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = content["model"]["vocab"] | {each["content"]: i for i, each in added.items()}
    texts = sorted(tokens, key=tokens.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(texts)
    for index, token in added.items():
        control = token["special"]
        kinds[index] = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(tokens["<|im_end|>"])
    writer.add_eot_token_id(tokens["<|endoftext|>"])
    writer.add_pad_token_id(tokens["<|pad|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((TINY / "chat_template.jinja").read_text())


def write_gguf(
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    folder: Path = TINY,
    architecture: str = "qwen2",
    tokenizer: Change = tiny_tokenizer,
    change: Change = nothing,
) -> Path:
    """A folder in Transformers' format as one GGUF file.

    Args:
        kind: The type of its matrices, by its name in GGUF ("F16", "Q4_0"), or of each by the
            matrix's name there. Types that the package doesn't make are random blocks. Vectors are
            in float32, as llama.cpp has it.
        architecture: GGUF's name for it. Of "llama" the rows of queries and keys are permuted.
        tokenizer: Writes the tokenizer; `nothing` for none.
        change: Writes what else the metadata say.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if head_dim := config.get("head_dim"):
        writer.add_rope_dimension_count(head_dim)
    tokenizer(writer)
    change(writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            kv = "num_key_value_heads" if "k_proj" in name else "num_attention_heads"
            values = _permuted(values, config[kv])
        place = _name_of(name)
        own = "F32" if values.ndim == 1 else kind(place) if callable(kind) else kind
        stored, wanted = _blocks(own, values, seed=zlib.crc32(place.encode()))
        writer.add_tensor(place, stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(kind: str, values: torch.Tensor, seed: int) -> tuple[Any, Any]:
    wanted = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values.numpy(), wanted), wanted
    except NotImplementedError:
        rows, columns = values.shape
        return random_rows(kind, rows, columns, float(values.std()), seed), wanted


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute like convert_hf_to_gguf.py: the halves of each head in turn."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def _name_of(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(middle)]}.{kind}"

"""GGUF files of models that tests have: the bundled one, and those of Llama's and Qwen2's kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
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
    kind: str = "F32",
    *,
    folder: Path = TINY,
    architecture: str = "qwen2",
    tokenizer: Change = tiny_tokenizer,
    change: Change = nothing,
    embedding: str = "",
) -> Path:
    """A folder in Transformers' format as one GGUF file.

    Args:
        kind: The type of its matrices, by its name in GGUF: "F32", "F16", "BF16", "Q8_0", "Q4_0".
            Vectors are in float32, as llama.cpp has it.
        architecture: GGUF's name for it. Of "llama" the rows of queries and keys are permuted.
        tokenizer: Writes the tokenizer; `nothing` for none.
        change: Writes what else the metadata say.
        embedding: The type of the embedding; "" is `kind`.
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
        own = embedding or kind if "embed_tokens" in name else kind
        wanted = gguf.GGMLQuantizationType[own if values.ndim > 1 else "F32"]
        stored = gguf.quants.quantize(values.numpy(), wanted)
        writer.add_tensor(_name_of(name), stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute like convert_hf_to_gguf.py: the halves of each head in turn."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def _name_of(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(middle)]}.{kind}"

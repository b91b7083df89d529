"""Writes a Qwen2 or Qwen3.5 model in Transformers' format as GGUF, for llama.cpp.

    python make_gguf.py FOLDER [BF16]       (or F32; needs torch, safetensors and gguf)
    python make_gguf.py FOLDER Q8_0         (or Q4_0; writes FOLDER-Q8_0.gguf)

With Q4_0 the embedding, which is the output layer too, is in Q8_0: llama-quantize takes Q6_K there,
which the package can't write.

llama.cpp's converter requires a tokenizer that it knows. This one takes that of
`random_models.py`, whose first two tokens are special.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from nano_inference.tests.gguf_files import write_gguf

FILE_TYPES = {
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "F32": gguf.LlamaFileType.ALL_F32,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def write_tokenizer(folder: Path, kind: str, writer: gguf.GGUFWriter) -> None:
    writer.add_file_type(FILE_TYPES[kind])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


_HYBRID = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_hybrid(target: Path, kind: str, folder: Path) -> None:
    """Write a Qwen3.5 model with as many heads of keys as of values.

    Of other models, llama.cpp has the heads in another order.
    """
    config = json.loads((folder / "config.json").read_text())
    assert config["linear_num_key_heads"] == config["linear_num_value_heads"]
    writer = gguf.GGUFWriter(target, "qwen35")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    writer.add_ssm_inner_size(inner)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    write_tokenizer(folder, kind, writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        _add_hybrid(writer, name.removeprefix("model."), tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_hybrid(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    if name == "norm.weight":
        name, place = "output_norm.weight", ""
    else:
        layers, _, rest = name.partition(".")
        place, _, rest = rest.partition(".") if layers == "layers" else ("", "", name)
        owner, _, end = rest.rpartition(".")
        name = f"{_HYBRID.get(owner, owner)}.{end}"
        name = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(name, name)
    if name == "ssm_a":
        tensor = -tensor.float().exp()
    elif tensor.dim() == 1 and name.endswith("norm.weight") and name != "ssm_norm.weight":
        tensor = 1 + tensor.float()
    prefix = f"blk.{place}." if place else ""
    if tensor.dim() == 2 and kind == "BF16":
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(prefix + name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(prefix + name, tensor.float().squeeze().contiguous().numpy())


if __name__ == "__main__":
    source, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "BF16"
    quantized = f"-{kind}" if kind.startswith("Q") else ""
    target = source.with_name(f"{source.name}{quantized}.gguf")
    if json.loads((source / "config.json").read_text())["model_type"] == "qwen3_5_text":
        write_hybrid(target, kind, source)
    else:
        embedding = "Q8_0" if kind == "Q4_0" else kind
        write_gguf(
            target,
            lambda name: embedding if name == "token_embd.weight" else kind,
            folder=source,
            tokenizer=partial(write_tokenizer, source, kind),
        )

"""Writes a Qwen2 model in Transformers' format as GGUF, for llama.cpp.

    python make_gguf.py FOLDER [BF16]       (or F32; needs torch, safetensors and gguf)

llama.cpp's converter requires a tokenizer that it knows. This one takes that of
`random_models.py`, whose first two tokens are special.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import gguf

from nano_inference.tests.gguf_files import write_gguf

FILE_TYPES = {"BF16": gguf.LlamaFileType.MOSTLY_BF16, "F32": gguf.LlamaFileType.ALL_F32}


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


if __name__ == "__main__":
    source, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "BF16"
    target = source.with_suffix(".gguf")
    write_gguf(target, kind, folder=source, tokenizer=partial(write_tokenizer, source, kind))

"""Models with random weights, in the shapes of `workloads.py`."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from workloads import FIRST_WORD, SHAPES, random_successors

PAD, EOS = "<|pad|>", "<|endoftext|>"
SPACE = "\u0120"
"""A space in byte-level vocabularies."""

TWO_LAYERS = SHAPES["S"] | {"num_hidden_layers": 2, "vocab_size": 32_768}
"""Two layers of Qwen2.5-0.5B with a vocabulary so small that the output layer doesn't dominate."""

SURE_LOGIT = 24.0
"""Logit of the next token in a model of known text; all others have together about 13, or 16 with
128 hidden values."""


def random_model(
    shape: dict[str, Any], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Any:
    """Return a Transformers model without gradients.

    `shape` has arguments of Qwen2Config, or of the configuration of its "model_type".
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{"model_type": "qwen2", **shape})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def write_model(folder: Path, shape: str) -> None:
    """Write a model in bfloat16, with a tokenizer in which every word of up to three letters, and
    many of four, is one token together with the space before it. The text of shape K is known."""
    settings = SHAPES[shape] | {
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape == "K":
        successors = random_successors(settings["vocab_size"], FIRST_WORD, seed=1)
        write_known_text_model(folder, settings, successors)
        return
    random_model(settings, torch.float32).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, settings["vocab_size"])


def write_zeros_model(folder: Path, settings: dict[str, Any]) -> int:
    """Write a Qwen2 model in bfloat16 whose weights are all zero, and return their bytes. The file
    takes no room on disk, and there is no tokenizer."""
    config = Qwen2Config(**settings, architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for name, each in model.named_parameters():
        places = [end, end := end + each.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(each.shape), "data_offsets": places}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    config.save_pretrained(folder)
    return end


def write_known_text_model(
    folder: Path, settings: dict[str, Any], successors: Sequence[int]
) -> None:
    """Write a model in bfloat16 whose greedy choice after token t is `successors[t]`.

    Its layers take the usual time and change an embedding too little to matter, so any engine, with
    any rounding, generates the same text. In its untied output layer the row of `successors[t]` is
    the embedding of t. The tokenizer is that of `write_model`.
    """
    model = random_model(settings, torch.float32)
    hidden_size, embeddings = settings["hidden_size"], model.model.embed_tokens.weight
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 2**-7
        layer.mlp.down_proj.weight *= 2**-7
    # The normalised state is sqrt(hidden_size) long, and a row of embeddings 0.02 times that.
    scale = SURE_LOGIT / (0.02 * hidden_size)
    model.lm_head.weight[torch.tensor(successors)] = embeddings * scale
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, settings["vocab_size"])


def write_tokenizer(folder: Path, size: int) -> None:
    tokenizer = word_tokenizer(size)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    fast.save_pretrained(folder)


def word_tokenizer(size: int) -> Tokenizer:
    """Return a byte-level tokenizer of the same kind as Qwen2's, which every engine reads: two
    special tokens, the 256 bytes, and as many words as fit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *alphabet))}
    merges = []
    # The vocabulary has all beginnings of each word, so merges add one letter at a time.
    for word in itertools.islice(_words(), size - len(vocabulary)):
        merges.append((word[:-1], word[-1]))
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _words() -> Iterator[str]:
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield SPACE + "".join(letters)

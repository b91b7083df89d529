"""Models of random weights, in the shapes of `workloads.py`."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from workloads import SHAPES

PAD, EOS = "<|pad|>", "<|endoftext|>"
SPACE = "\u0120"
"""What a space is in byte-level vocabularies."""

TWO_LAYERS = SHAPES["S"] | {"num_hidden_layers": 2, "vocab_size": 32_768}
"""Of Qwen2.5-0.5B, with a vocabulary so small that the output layer does not hide the rest."""

SURE_LOGIT = 24.0
"""Of the token that follows, in a model whose text is known; of all others together it is some 13,
or 16 in one of 128 hidden values."""


def random_model(
    shape: dict[str, Any], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Any:
    """A Transformers model without gradients; `shape` is what Qwen2Config takes."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def write_model(folder: Path, shape: str) -> None:
    """Writes a model in bfloat16, with a tokenizer in which every word of up to three letters, and
    many of four, is one token together with the space before it."""
    settings = SHAPES[shape] | {
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    random_model(settings, torch.float32).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, settings["vocab_size"])


def random_successors(size: int, first: int, seed: int) -> list[int]:
    """For each token the one that follows it: those from `first` on are one circle in an order of
    chance, and those before stand behind themselves."""
    circle = list(range(first, size))
    random.Random(seed).shuffle(circle)
    successors = list(range(size))
    for token, following in itertools.pairwise([*circle, circle[0]]):
        successors[token] = following
    return successors


def write_known_text_model(
    folder: Path, settings: dict[str, Any], successors: Sequence[int]
) -> None:
    """Writes a model in bfloat16 that greedily lets `successors[t]` follow token t.

    What its layers add to an embedding is too small to matter, while they take as long as any
    others; so any engine, with any rounding, writes the same. The output layer is one of its own:
    the row of `successors[t]` is the embedding of t. The tokenizer is that of `write_model`.
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
    _write_tokenizer(folder, settings["vocab_size"])


def _write_tokenizer(folder: Path, size: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(size), eos_token=EOS, pad_token=PAD
    )
    fast.save_pretrained(folder)


def word_tokenizer(size: int) -> Tokenizer:
    """Byte-level, as Qwen2's is, so that every program that reads a Qwen2 model has it: two special
    tokens, the 256 bytes, and as many words as fit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *alphabet))}
    merges = []
    # Any word that is there has all of its beginnings, and grows from them letter by letter.
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

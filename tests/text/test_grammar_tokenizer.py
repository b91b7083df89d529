"""Text that a grammar forces is made of the vocabulary's tokens, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nano_inference.text.grammar_tokenizer import grammar_tokenizer, spellings

from ..tokenizer_families import byte_level

TEXTS = [
    *(
        "<think>ab</think>",
        "a<think>b",
        "<s>",
        "a</s>b",
        "<unk>",
        "<|tool|>",
        "[INST]",
        "<tool call>",
    ),
    *(
        "e\u0301x",
        "Cafe\u0301",
        "\u212b \ufb01 ÅÉ",
        "\uff21\uff22",
        "İSTANBUL",
        "  a \n\t b  ",
        "日本語 🙂🙃",
    ),
    *("a [MID] b", "x" * 600, "\u0000\u007f\ufffd", " ", "▁a"),
]
ADDED = [
    AddedToken("<think>", special=False),
    AddedToken("</think>", special=False, normalized=True),
    AddedToken("<|tool|>", special=True),
    AddedToken("[INST]", special=True),
    AddedToken("[MID]", special=False, lstrip=True, rstrip=True),
]


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([token for token in ADDED if not token.special])
    tokenizer.add_special_tokens([token for token in ADDED if token.special])
    return tokenizer


def normalised(*parts: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence(list(parts))
    return tokenizer


def prefixed() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    return tokenizer


def cut_and_filled() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_token="<s>")
    return tokenizer


def whole_words() -> Tokenizer:
    """A tokenizer like Llama 3's: a word of the vocabulary is taken as it is, without merges."""
    state = json.loads(byte_level().to_str())
    state["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(state))


def sentence_piece() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are a letter of their own, before each text too, and `<s>`
    is a piece, which merges make.
    """
    letters = ["▁", *"<>/s|thinkaoleb", "é", "s>", "<s>", "▁a"]
    tokens = list(dict.fromkeys(["<unk>", "<s>", "</s>", *letters]))
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("s", ">"), ("<", "s>"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "NFC": lambda: normalised(normalizers.NFC()),
    "lower case": lambda: normalised(
        normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents(), normalizers.Strip()
    ),
    "a space before": prefixed,
    "cut and filled": cut_and_filled,
    "whole words": whole_words,
    "pieces": sentence_piece,
}


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_comes_byte_for_byte(kind: str) -> None:
    backend = with_added(KINDS[kind]())
    end = backend.token_to_id("</s>")
    tokenizer = LLTokenizer(grammar_tokenizer(backend), eos_token=[end])
    hidden = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    for text in TEXTS:
        if kind == "pieces" and "▁" in text:
            continue  # its token is a space
        matcher = LLMatcher(tokenizer, grammar_from("choice", json.dumps([text])), log_level=0)
        found: list[int] = []
        while not matcher.is_accepting():
            mask = matcher.compute_logit_bias()
            assert not matcher.is_error(), (text, matcher.get_error())
            found.append(next(id for id, allowed in enumerate(mask) if allowed))
            matcher.consume_token(found[-1])
        assert tokenizer.decode_bytes(found) == text.encode()
        assert not hidden & set(found), text


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_keep_their_ids_and_texts(kind: str) -> None:
    backend = with_added(KINDS[kind]())
    size, end = backend.get_vocab_size(), backend.token_to_id("</s>")
    before = LLTokenizer(backend.to_str(), eos_token=[end])
    after = LLTokenizer(grammar_tokenizer(backend), eos_token=[end])
    assert before.vocab_size == after.vocab_size == size
    for token_id in range(size):
        special = before.is_special_token(token_id)
        assert after.is_special_token(token_id) is special
        assert special or before.decode_bytes([token_id]) == after.decode_bytes([token_id])
    shown = spellings(backend, after, [end])
    names = {"<think>", "</think>"} | ({"<tool call>", "<étape>"} & set(backend.get_vocab()))
    assert set(shown) == names
    for name, (token_id, spelled) in shown.items():
        assert token_id == backend.token_to_id(name)
        assert token_id not in spelled
        assert after.decode_bytes(spelled) == name.encode()

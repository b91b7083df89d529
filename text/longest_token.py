"""The largest number of bytes that a token of a vocabulary stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from .tokenizer import ANY_LENGTH, parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_KEEPING = frozenset(
    {"ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
)
"""Pre-tokenizers that drop nothing, except with the behavior "Removed"."""

# Factors by which a normalizer may shrink bytes. Normal forms: 4 for compatibility characters such
# as U+1D400, 3.5 for U+0390 written with U+1FBE. Lower case: 3 for U+212A, the kelvin sign.
_SHRINKING = {
    **dict.fromkeys(("ByteLevel", "Prepend"), 1),
    "Lowercase": 3,
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), 4),
}


def longest_token_bytes(tokenizer: PreTrainedTokenizerFast | None) -> int:
    """Return the largest number of UTF-8 bytes that a text has per token.

    So a text has at least `len(text.encode()) / longest_token_bytes` tokens, known without
    tokenising it. Scans the whole vocabulary: call it once per tokenizer.

    Returns:
        The longest token's bytes, times the factor by which the normalizer may shrink a text; or
        `ANY_LENGTH` without a tokenizer, or if a token may represent or swallow text of any length:
        a normalizer or pre-tokenizer that drops characters, an "unknown" token for a whole word or
        a run of characters, special tokens that strip adjacent spaces. Truncation is never applied
        to prompts.
    """
    if tokenizer is None:
        return ANY_LENGTH
    backend = tokenizer.backend_tokenizer
    normalizers = list(parts_of(backend.normalizer, "normalizers"))
    before = list(parts_of(backend.pre_tokenizer, "pretokenizers"))
    byte_level = any(part["type"] == "ByteLevel" for part in normalizers + before)
    added = backend.get_added_tokens_decoder().values()
    if (
        not _reads_everything(backend.model, byte_level)
        or any(part["type"] not in _KEEPING or part.get("behavior") == "Removed" for part in before)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return ANY_LENGTH
    # A byte-level token has one character per byte. Other tokens are at most as short as their
    # text.
    sizes = (len(token if byte_level else token.encode()) for token in _vocabulary(backend))
    own = (len(_normalized(backend, token).encode()) for token in added)
    # Four bytes: a character without a token may become one "unknown" token.
    longest = max((4, *sizes, *own))
    return int(min(ANY_LENGTH, longest * math.prod(map(_shrinks, normalizers))))


def _shrinks(normalizer: dict[str, Any]) -> float:
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String", ""), normalizer["content"]
        if old and new:
            return max(1, len(old.encode()) / len(new.encode()))
    return _SHRINKING.get(normalizer["type"], ANY_LENGTH)


def _vocabulary(backend: Tokenizer) -> Iterator[str]:
    """Yield the tokens without the added ones. A dict of 151,936 of them would take 28 MB, which
    stay with the process."""
    id_to_token = backend.model.id_to_token
    for token in map(id_to_token, range(backend.get_vocab_size(with_added_tokens=False))):
        if token is None:  # ids have gaps
            yield from backend.get_vocab(with_added_tokens=False)
            return
        yield token


def _reads_everything(model: Any, byte_level: bool) -> bool:
    """Return whether every character, or every byte, of a text belongs to a token."""

    def has(tokens: Iterable[str]) -> bool:
        return all(model.token_to_id(token) is not None for token in tokens)

    if byte_level and isinstance(model, models.BPE):
        return has(pre_tokenizers.ByteLevel.alphabet())
    if isinstance(model, models.BPE) and model.unk_token and not model.fuse_unk:
        return True
    # Unigram doesn't expose the setting as an attribute.
    bytes_too = isinstance(model, models.BPE | models.Unigram) and (
        b'"byte_fallback":true' in model.__getstate__()
    )
    return bytes_too and has(f"<0x{byte:02X}>" for byte in range(256))


def _normalized(backend: Tokenizer, token: AddedToken) -> str:
    """Return an added token's text as it is matched."""
    if token.normalized and backend.normalizer is not None:
        return str(backend.normalizer.normalize_str(token.content))
    return token.content

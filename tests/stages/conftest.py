"""Fixtures of tokenizers."""

from ..byte_tokenizers import (  # noqa: F401
    plain_tokenizer,
    tokenizer,
    word_tokenizer,
)

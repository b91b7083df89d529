"""Fixtures of tokenizers."""

import pytest
from tokenizers import Tokenizer

from ..byte_tokenizers import (  # noqa: F401
    plain_tokenizer,
    tokenizer,
    word_tokenizer,
)
from ..tokenizer_families import FAMILIES


@pytest.fixture(scope="session")
def families() -> dict[str, Tokenizer]:
    return {name: make() for name, make in FAMILIES.items()}

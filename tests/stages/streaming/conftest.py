"""A byte-level tokenizer, and a client of the core."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from ...tokenizer_families import byte_level
from .client import Client


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")


@pytest.fixture
def client(tokenizer: PreTrainedTokenizerFast) -> Client:
    return Client(tokenizer)

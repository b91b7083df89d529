"""Small tokenizers, made on the spot."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{% if message.role == 'system' and not loop.first %}\
{{ raise_exception('the system message must come first') }}{% endif %}\
{% if 'divide' in message.content %}{{ 1 / 0 }}{% endif %}\
{{ message.role }}:{{ message.content }}{{ eos_token }}{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}"""


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, "<s>" added before raw text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=16
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Without a chat template."""
    return byte_tokenizer(None)


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Two words, no token for any other: the library refuses those with a bare Exception."""
    backend = Tokenizer(models.WordLevel({"red": 0, "fox": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)

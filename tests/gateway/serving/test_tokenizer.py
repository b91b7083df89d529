"""The gateway's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from nano_inference.config import EngineConfig, ModelError
from nano_inference.gateway.serving.tokenizer import LazyTokenizer

END = "<|endoftext|>"


@pytest.fixture
def folder() -> Path:
    return EngineConfig().model_folder


async def test_special_tokens_are_shown_on_request(folder: Path) -> None:
    words = await LazyTokenizer(folder).get()
    token_ids = words.token_ids("98 + 25 =")
    (end,) = words.token_ids(END)
    assert end in words.stop_token_ids
    assert words.text([*token_ids, end], skip_special=True) == "98 + 25 ="
    assert words.text([*token_ids, end], skip_special=False) == f"98 + 25 ={END}"
    assert words.token(end) == END


async def test_loaded_once(folder: Path) -> None:
    lazy = LazyTokenizer(folder)
    assert await lazy.get() is await lazy.get()


async def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        await LazyTokenizer(tmp_path).get()

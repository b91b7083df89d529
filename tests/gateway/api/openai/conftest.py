"""OpenAI's library, and a model whose template knows of tools and reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from nano_inference.config import Config
from nano_inference.gateway.serving.tokenizer import Tokenizer

from ...fake import LIMIT_S, FakeEngine
from ...made import interleaved
from ...saying import Model, calling_model, words_of


@pytest.fixture
def engine() -> FakeEngine:
    """An engine whose samples have three tokens, in chunks of one."""
    return FakeEngine(interleaved)


@pytest.fixture
async def client(connected: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url="http://127.0.0.1/v1", timeout=LIMIT_S, **connected) as made:
        yield made


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Its settings."""
    return calling_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def words(calling: Config) -> Tokenizer:
    """Its tokenizer."""
    return words_of(calling)


@pytest.fixture
def model(engine: FakeEngine, words: Tokenizer) -> Model:
    """It, on a fake engine."""
    return Model(engine, words)

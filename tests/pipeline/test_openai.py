"""OpenAI's and Anthropic's own clients, and the commands of documents, against a whole pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from nano_inference import InferenceEngine
from nano_inference.config import load_config

from .conftest import LIMIT_S
from .documents import commands_of, told_by

# --- OpenAI's client -------------------------------------------------------------------------


PROMPTS = [
    "98 + 25 =",
    "Story about David, a dog and a yellow hat:",
    "Tara, 65, is a chef from 東京. JSON:",
]
# Logprobs to the last bit, whatever else is in a batch.
SETTINGS = {"engine.dtype": "float32", "engine.deterministic": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S) as made:
        yield made


async def test_embeddings_are_the_engine_s(client: AsyncOpenAI) -> None:
    """In the same bits: deterministic mode has no other beside others."""

    def run() -> list[list[float]]:
        with InferenceEngine(load_config(env={}, overrides=SETTINGS).engine) as engine:
            found: list[list[float]] = engine.embed(PROMPTS, pooling="last", dimensions=40).tolist()
            return found

    answer, wanted = await asyncio.gather(
        client.embeddings.create(
            model="tiny", input=PROMPTS, dimensions=40, extra_body={"pooling": "last"}
        ),
        asyncio.to_thread(run),
    )
    assert [each.embedding for each in answer.data] == wanted
    ranked = await client.post(
        "/rerank",
        body={"query": PROMPTS[0], "documents": PROMPTS, "pooling": "last"},
        cast_to=object,
    )
    assert ranked["results"][0]["index"] == 0  # type: ignore[index]


@pytest.mark.parametrize("command", commands_of("openai.md"))
async def test_the_document_s_commands_run(url: str, command: str) -> None:
    told = await told_by(command, url)
    # A sample may go on until its tokens are used up.
    ends = (
        '"finish_reason":"',
        *(f'"status":"{s}"' for s in ("completed", "incomplete", "queued")),
    )
    assert any(each in told for each in ends)


# --- Anthropic's client ----------------------------------------------------------------------


@pytest.mark.parametrize("command", commands_of("anthropic.md"))
async def test_the_commands_of_anthropic_md_run(url: str, command: str) -> None:
    told = await told_by(command, url)
    assert '"stop_reason":"' in told


# --- Ollama's interface ----------------------------------------------------------------------


@pytest.mark.parametrize("command", commands_of("ollama.md"))
async def test_the_commands_of_ollama_md_run(url: str, command: str) -> None:
    told = await told_by(command, url)
    assert '"done":true,"done_reason":"' in told

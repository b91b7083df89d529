"""OpenAI's and Anthropic's own clients against a whole pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.config import load_config

from .conftest import LIMIT_S
from .documents import commands_of, told_by

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

# --- OpenAI's client -------------------------------------------------------------------------


PROMPTS = [
    "98 + 25 =",
    "Story about David, a dog and a yellow hat:",
    "Tara, 65, is a chef from 東京. JSON:",
]
EXTRA = {"return_token_ids": True}
# Logprobs to the last bit, whatever else is in a batch.
SETTINGS = {"engine.dtype": "float32", "engine.deterministic": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S) as made:
        yield made


async def generated(prompts: list[Any], **sampling: Any) -> list[Any]:
    """By the engine alone, in a thread of its own, since the pipeline runs on this one."""

    def run() -> list[Any]:
        with InferenceEngine(load_config(env={}, overrides=SETTINGS).engine) as engine:
            return list(engine.generate(prompts, SamplingParams(temperature=0.0, **sampling)))

    return await asyncio.to_thread(run)


async def test_greedy_completions_are_the_engine_s(client: AsyncOpenAI) -> None:
    wanted = await generated(PROMPTS, max_tokens=24)
    answer = await client.completions.create(
        model="tiny", prompt=PROMPTS, temperature=0, max_tokens=24, logprobs=0, extra_body=EXTRA
    )
    assert len(answer.choices) == len(wanted)
    for choice, sample in zip(answer.choices, wanted, strict=True):
        assert choice.token_ids == list(sample.completion_tokens)  # type: ignore[attr-defined]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(sample.logprobs)
        assert choice.finish_reason == sample.finish_reason


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


async def test_a_stream_equals_the_answer(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[2], "temperature": 0}
    asked |= {"max_tokens": 40, "logprobs": 2, "echo": True, "extra_body": EXTRA}
    (whole,) = (await client.completions.create(**asked)).choices
    text, token_ids, logprobs = "", [], []
    async for chunk in await client.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        text += choice.text
        token_ids += choice.token_ids
        logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
    assert text == whole.text
    assert text.startswith(PROMPTS[2])
    assert token_ids == whole.token_ids  # type: ignore[attr-defined]
    assert whole.logprobs is not None
    assert logprobs == whole.logprobs.token_logprobs
    # What a token's offset says is where it stands, as far as characters are not cut.
    for token, offset in zip(
        whole.logprobs.tokens or (), whole.logprobs.text_offset or (), strict=True
    ):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert whole.text.startswith(token, offset)


async def test_a_chat_is_answered(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "How much is 6 + 6?"}], temperature=0
    )
    assert answer.choices[0].message.content == "12"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "weights-0"
    again = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "How much is 6 + 6?"},
            {"role": "assistant", "content": "1"},
        ],
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert again.choices[0].message.content == "2"


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


STORY: Any = [{"role": "user", "content": "Write a story about Maria, a mouse and a boat."}]
GREEDY = {"temperature": 0}


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic_client(url: str) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url, api_key="none", timeout=LIMIT_S) as made:
        yield made


async def chat(url: str, **fields: Any) -> dict[str, Any]:
    """The same by OpenAI's interface."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        body = {"messages": STORY, "temperature": 0} | fields
        found: dict[str, Any] = (await http.post("/v1/chat/completions", json=body)).json()
        return found


def text_of(message: Any) -> str:
    (block,) = message.content
    text: str = block.text
    return text


async def test_a_message_is_the_chat_s(url: str, anthropic_client: AsyncAnthropic) -> None:
    wanted = await chat(url, max_tokens=30)
    asked: Any = {"model": "tiny", "max_tokens": 30, "messages": STORY, "extra_body": GREEDY}
    message = await anthropic_client.messages.create(**asked)
    assert text_of(message) == wanted["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 30
    usage = message.usage
    prompt = wanted["usage"]["prompt_tokens"]
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
    counted = await anthropic_client.messages.count_tokens(model="tiny", messages=STORY)
    assert counted.input_tokens == prompt
    async with anthropic_client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == text_of(message) == text_of(streamed)
    assert streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == 30


@pytest.mark.parametrize("command", commands_of("anthropic.md"))
async def test_the_commands_of_anthropic_md_run(url: str, command: str) -> None:
    told = await told_by(command, url)
    assert '"stop_reason":"' in told

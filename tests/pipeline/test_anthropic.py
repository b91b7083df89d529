"""Anthropic's library against a whole pipeline: its messages are those of OpenAI's chats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic

from .conftest import LIMIT_S
from .documents import commands_of, told_by

STORY: Any = [{"role": "user", "content": "Write a story about Maria, a mouse and a boat."}]
GREEDY = {"temperature": 0}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with (
        asyncio.timeout(LIMIT_S),
        AsyncAnthropic(base_url=url, api_key="none", timeout=LIMIT_S) as made,
    ):
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


async def test_a_message_is_the_chat_s(url: str, client: AsyncAnthropic) -> None:
    wanted = await chat(url, max_tokens=30)
    asked: Any = {"model": "tiny", "max_tokens": 30, "messages": STORY, "extra_body": GREEDY}
    message = await client.messages.create(**asked)
    assert text_of(message) == wanted["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 30
    usage = message.usage
    prompt = wanted["usage"]["prompt_tokens"]
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == prompt
    counted = await client.messages.count_tokens(model="tiny", messages=STORY)
    assert counted.input_tokens == prompt
    async with client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == text_of(message) == text_of(streamed)
    assert streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == 30


async def test_a_stop_sequence_is_reported(client: AsyncAnthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 40, "messages": STORY, "extra_body": GREEDY}
    free = text_of(await client.messages.create(**asked))
    stop = free[6:12]
    asked["stop_sequences"] = ["\u6771", stop]
    message = await client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == free.partition(stop)[0]
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)
    assert text_of(streamed) == text_of(message)


async def test_an_answer_ends_by_itself_and_a_beginning_is_continued(
    client: AsyncAnthropic,
) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 40, "extra_body": GREEDY}
    question = {"role": "user", "content": "How much is 6 + 6?"}
    whole = await client.messages.create(messages=[question], **asked)
    assert (text_of(whole), whole.stop_reason) == ("12", "end_turn")
    begun = {"role": "assistant", "content": "1"}
    rest = await client.messages.create(messages=[question, begun], **asked)
    assert text_of(rest) == "2"


async def test_the_synchronous_client(url: str) -> None:
    def ask() -> tuple[str, str]:
        with Anthropic(base_url=url, api_key="none", timeout=LIMIT_S) as client:
            asked: Any = {"model": "tiny", "max_tokens": 20, "messages": STORY}
            asked["extra_body"] = GREEDY
            whole = text_of(client.messages.create(**asked))
            with client.messages.stream(**asked) as stream:
                return whole, "".join(stream.text_stream)

    async with asyncio.timeout(LIMIT_S):
        whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed
    assert whole


@pytest.mark.parametrize("command", commands_of("anthropic.md"))
async def test_the_document_s_commands_run(url: str, command: str) -> None:
    told = await told_by(command, url)
    assert '"stop_reason":"' in told

"""openai-python reads what it is sent: answers, streams and errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from ...fake import FakeEngine, refused
from ...made import LOGPROBS, TEXTS, TOKENS, cut

TEXT = "".join(TEXTS)
HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert [each.logprob for each in logprobs.content or ()] == list(LOGPROBS)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_three_interleaved_choices_are_put_together(client: AsyncOpenAI) -> None:
    """Its helper wants first chunks in the order of their indices, and roles once."""
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, n=3, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


async def test_a_completion_with_fields_of_ours(client: AsyncOpenAI, engine: FakeEngine) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt="a",
        stream=True,
        extra_body={"return_token_ids": True, "top_k": 5},
    )
    token_ids: list[int] = []
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        token_ids += chunk.choices[0].token_ids  # type: ignore[attr-defined]
    assert (text, token_ids) == (TEXT, list(TOKENS))
    assert engine.requests[0].sampling.top_k == 5


async def test_a_field_that_is_refused_is_named(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="tiny", messages=HELLO, modalities=["audio"])
    assert (raised.value.param, raised.value.code) == ("modalities", "unsupported")


async def test_expired_calls_are_not_retried(client: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.outputs = refused("expired")
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=2).chat.completions.create(
            model="tiny", messages=HELLO
        )
    assert len(engine.requests) == 1


async def test_an_error_in_mid_stream_raises(client: AsyncOpenAI, engine: FakeEngine) -> None:
    no = refused("lane_failed", "because")
    engine.outputs = lambda request: [*cut(request), *no(request)]
    text = ""
    with pytest.raises(openai.APIError, match="because") as raised:
        async for chunk in await client.completions.create(model="tiny", prompt="a", stream=True):
            text += chunk.choices[0].text
    assert text == TEXTS[0]
    assert (raised.value.code, raised.value.type) == ("lane_failed", "server_error")


async def test_the_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "nano-inference"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")

"""Usage marks a response from the response cache in each interface, where clients tolerate it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from nano_inference.bus.public import Completion, GenerateRequest, Output

from .fake import Client, FakeEngine
from .made import interleaved, whole

HELLO: Any = [{"role": "user", "content": "hello"}]


def served(request: GenerateRequest) -> list[Output]:
    """Return `interleaved`'s outputs, from the response cache."""
    *chunks, end = interleaved(request) if request.stream else whole(request)
    assert isinstance(end, Completion)
    cached = end.usage.completion_tokens
    usage = msgspec.structs.replace(end.usage, cached_completion_tokens=cached)
    return [*chunks, msgspec.structs.replace(end, usage=usage)]


def within(answer: Any, path: str) -> Any:
    for name in path.split("."):
        answer = (answer or {}).get(name)
    return answer


@pytest.mark.parametrize(
    ("call", "body", "path"),
    [
        ("/v1/completions", {"prompt": "a"}, "usage.completion_tokens_details.cached_tokens"),
        (
            "/v1/chat/completions",
            {"messages": HELLO},
            "usage.completion_tokens_details.cached_tokens",
        ),
        ("/v1/responses", {"input": "a"}, "usage.output_tokens_details.cached_tokens"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, "usage.cached_output_tokens"),
        ("/generate", {"text": "a"}, "meta_info.cached_completion_tokens"),
    ],
)
async def test_usage_has_the_mark_of_a_served_response_alone(
    http: Client, call: str, body: dict[str, Any], path: str
) -> None:
    for outputs, marked in ((served, 3), (whole, None)):
        http.engine.outputs = outputs
        answer = await http.post(call, json=body)
        assert answer.status_code == 200, answer.text
        assert within(answer.json(), path) == marked


async def test_the_mark_counts_all_choices(http: Client) -> None:
    http.engine.outputs = served
    answer = (await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["completion_tokens_details"] == {"cached_tokens": 12}


async def test_openai_s_library_reads_it_in_a_stream(
    connected: dict[str, Any], engine: FakeEngine
) -> None:
    engine.outputs = served
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async with AsyncOpenAI(base_url="http://127.0.0.1/v1", **connected) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, **options)
        last = [chunk async for chunk in stream][-1]
    assert last.usage is not None
    details = last.usage.completion_tokens_details
    assert details is not None
    assert details.model_dump()["cached_tokens"] == 3


async def test_anthropic_s_library_reads_it_in_a_stream(
    connected: dict[str, Any], engine: FakeEngine
) -> None:
    from anthropic import AsyncAnthropic

    engine.outputs = served
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
    async with (
        AsyncAnthropic(base_url="http://127.0.0.1", **connected) as client,
        client.messages.stream(**asked) as stream,
    ):
        events = [event async for event in stream]
    (delta,) = (event for event in events if event.type == "message_delta")
    assert delta.usage.model_dump()["cached_output_tokens"] == 3

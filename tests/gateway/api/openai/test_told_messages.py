"""Reasoning and calls over HTTP: in one piece, streamed, and gone on with at another gateway."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from httpx import AsyncClient

from nano_inference.bus.public import GenerateRequest, Output, Usage
from nano_inference.config import Config, load_config
from nano_inference.gateway.app import make_app
from nano_inference.telemetry.instruments import TOOL_CALLS

from ...fake import FakeEngine, completion
from ...recorded import Recorded
from ...sampled import CALL, ids, joined, make
from .streamed import Event, events, stream_of
from .test_deltas import Sent, message_told, told_by

CHAT = "/v1/chat/completions"
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}{# <think> <tool_call> "name" #}"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": [ADD], "n": 2}
TEXT = f"<think>\nIt is 98.\n</think>\n\nSo STO {CALL}\n{CALL}\n98 STOP it"


def says(request: GenerateRequest) -> list[Output]:
    """What the engine makes of it, one sample ahead of the other."""
    made = make(ids(TEXT), request.sampling.stop, "stop")
    chunks = [
        msgspec.structs.replace(chunk, request_id=request.request_id, sample_index=index)
        for index in reversed(range(request.n))
        for chunk in joined(made.chunks, [3])
    ]
    samples = [
        msgspec.structs.replace(made.sample, sample_index=index) for index in range(request.n)
    ]
    usage = Usage(
        prompt_tokens=4, completion_tokens=request.n * len(made.sample.token_ids), cached_tokens=0
    )
    return [*chunks, completion(request, *samples, usage=usage)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path / "model"
    shutil.copytree(Config().engine.model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"engine.model_path": str(folder), "gateway.message_format": "qwen"}
    return load_config(env={}, overrides=settings)


@pytest.fixture
def told() -> Recorded:
    return Recorded()


@pytest.fixture
async def gateways(
    engine: FakeEngine, config: Config, told: Recorded
) -> AsyncIterator[list[AsyncClient]]:
    """Two on one bus."""
    engine.outputs = says
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                AsyncClient(
                    transport=httpx.ASGITransport(make_app(engine, config, told.measures)),  # type: ignore[arg-type]
                    base_url="http://127.0.0.1",
                )
            )
            for _ in range(2)
        ]


def messages(told: list[Event]) -> dict[int, dict[str, Any]]:
    """By choice, what a client makes of the stream."""
    sent: dict[int, list[Sent]] = {0: [], 1: []}
    for event in told:
        for choice in (event.data or {"choices": []})["choices"]:
            sent[choice["index"]].append(Sent(choice, 0))
    return {index: told_by(events) for index, events in sent.items()}


@pytest.mark.parametrize("stop", [[], ["STOP"]])
@pytest.mark.parametrize("listed", [{}, {"logprobs": True, "return_token_ids": True}])
async def test_another_gateway_goes_on_behind_each_event(
    gateways: list[AsyncClient], stop: list[str], listed: dict[str, Any]
) -> None:
    http, other = gateways
    asked = HELLO | {"stop": stop} | listed
    whole = (await http.post(CHAT, json=asked)).json()
    for choice in whole["choices"]:
        for call in choice["message"]["tool_calls"]:
            assert call.pop("id").startswith("call_")
    told = stream_of(await http.post(CHAT, json=asked | {"stream": True}))
    wanted = messages(told)
    for choice in whole["choices"]:
        found = wanted[choice["index"]]
        message = message_told(found)
        calls = [call.pop("id") for call in message["tool_calls"]]
        assert len({*calls}) == 2
        assert message == choice["message"]
        assert found["reasons"] == [choice["finish_reason"]] == ["tool_calls"]
        if listed:
            assert found["tokens"] == choice["token_ids"]
            assert found["logprobs"] == choice["logprobs"]["content"]
    url = f"/v1/streams/{told[0].event_id.partition('.')[0]}"
    for number, event in enumerate(told, 1):
        rest = await other.get(url, params={"after": event.event_id})
        assert messages([*told[:number], *stream_of(rest)]) == wanted


async def test_usage_and_metrics(gateways: list[AsyncClient], told: Recorded) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole = (await gateways[0].post(CHAT, json=HELLO)).json()["usage"]
    assert told.values(TOOL_CALLS) == {("made",): 4, ("malformed",): 0}
    *_, last = events(await gateways[0].post(CHAT, json=HELLO | options))
    assert last["usage"] == whole
    assert whole["completion_tokens_details"]["reasoning_tokens"] > 2
    assert told.values(TOOL_CALLS) == {("made",): 8, ("malformed",): 0}


async def test_nothing_is_looked_for_without_tools(gateways: list[AsyncClient]) -> None:
    for body in ({"tools": []}, {"tool_choice": "none"}):
        choice = (await gateways[0].post(CHAT, json=HELLO | body)).json()["choices"][0]
        assert CALL in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"

"""Streams of OpenAI's interface outlive their connection: a whole pipeline, and two gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple

import httpx
import pytest

from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from ..gateway.api.openai.streamed import Event, Recorded, event_of, stream_of
from .conftest import LIMIT_S, MakeConfig

SHORT_MODEL = True
COMPLETIONS = "/v1/completions"
STORY: dict[str, Any] = {
    "prompt": "Story about David, a dog and a yellow hat:",
    "stream": True,
    "max_tokens": 24,
    "ignore_eos": True,
    "seed": 7,
}
SHORT = STORY | {"max_tokens": 150}
ALL: dict[str, Any] = {
    "n": 3,
    "logprobs": 2,
    "echo": True,
    "return_token_ids": True,
    "return_weight_versions": True,
    "stream_options": {"include_usage": True},
}


class House(NamedTuple):
    """Clients of two gateways in front of a pipeline."""

    first: httpx.AsyncClient
    second: httpx.AsyncClient


@pytest.fixture
async def house(make_config: MakeConfig) -> AsyncIterator[House]:
    config = make_config()
    async with AsyncExitStack() as stack:
        pipeline = await stack.enter_async_context(Pipeline(config))
        clients = []
        for _ in range(2):
            gateway = await stack.enter_async_context(Gateway(pipeline.client, config))
            client = httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S)
            clients.append(await stack.enter_async_context(client))
        yield House(*clients)


async def read(answer: httpx.Response) -> AsyncIterator[Event]:
    """Events of a stream, as they come."""
    parts: list[str] = []
    async with aclosing(answer.aiter_lines()) as lines:
        async for line in lines:
            if line:
                parts.append(line)
            else:
                yield event_of("\n".join(parts))
                parts.clear()


@pytest.mark.parametrize("more", [{}, ALL], ids=["text", "all"])
async def test_another_gateway_resumes_behind_each_event(
    house: House, more: dict[str, Any]
) -> None:
    told = stream_of(await house.first.post(COMPLETIONS, json=STORY | more))
    wanted = vars(Recorded(told))
    assert all(len(each["texts"][0]) > 20 for each in Recorded(told).choices.values())
    for number, event in enumerate(told, 1):
        url = f"/v1/streams/{event.event_id.partition('.')[0]}"
        rest = stream_of(await house.second.get(url, params={"after": event.event_id}))
        assert vars(Recorded([*told[:number], *rest])) == wanted


async def test_a_running_stream_has_two_readers(house: House) -> None:
    """Two connections, at two gateways; that the first one closes ends nothing any more."""
    body = SHORT | {"return_token_ids": True}
    async with house.first.stream("POST", COMPLETIONS, json=body) as answer:
        events = read(answer)
        begun = [await anext(events) for _ in range(3)]
        url = f"/v1/streams/{begun[-1].event_id.partition('.')[0]}"
        async with house.second.stream("GET", url, params={"after": begun[-1].event_id}) as second:
            others = read(second)
            rest = [await anext(others)]
            await events.aclose()
            await answer.aclose()
            rest += [event async for event in others]
    (choice,) = Recorded([*begun, *rest]).choices.values()
    assert (len(choice["tokens"]), choice["reasons"]) == (150, ["length"])
    whole = await house.first.post(COMPLETIONS, json=body | {"stream": False})
    assert "".join(choice["texts"]) == whole.json()["choices"][0]["text"]

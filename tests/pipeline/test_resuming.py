"""Streams of OpenAI's interface outlive their connection: a whole pipeline, and two gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx
import pytest

from nano_inference.config import Config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.pipeline import Pipeline

from ..gateway.api.openai.streamed import Event, Recorded, event_of, response_events, stream_of
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
KEY = {"Idempotency-Key": "k-1"}
LONG = STORY | {"max_tokens": 1900}
SHORT = STORY | {"max_tokens": 150}
ALL: dict[str, Any] = {
    "n": 3,
    "logprobs": 2,
    "echo": True,
    "return_token_ids": True,
    "return_weight_versions": True,
    "stream_options": {"include_usage": True},
}


class House:
    """A pipeline, and clients of two gateways in front of it."""

    def __init__(self, pipeline: Pipeline, clients: list[httpx.AsyncClient]) -> None:
        self.pipeline = pipeline
        self.first, self.second = clients


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
async def house(make_config: MakeConfig, settings: dict[str, Any]) -> AsyncIterator[House]:
    config = make_config(**settings)
    async with AsyncExitStack() as stack:
        pipeline = await stack.enter_async_context(Pipeline(config))
        urls = [
            (
                await stack.enter_async_context(
                    Gateway(await _client(stack, config, pipeline), config)
                )
            )
            for _ in range(2)
        ]
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=each.url, timeout=LIMIT_S))
            for each in urls
        ]
        yield House(pipeline, clients)


async def _client(stack: AsyncExitStack, config: Config, pipeline: Pipeline) -> BusClient:
    """One of its own, where the bus can be reached from elsewhere."""
    if config.bus.url == "memory":
        return pipeline.client
    return await stack.enter_async_context(BusClient.connect(config.bus))


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


async def test_another_gateway_resumes_responses_behind_each_event(house: House) -> None:
    body = {
        "input": "Write a story about Maria, a mouse and a boat.",
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 24,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
    }
    events = response_events(await house.first.post("/v1/responses", json=body))
    where = f"/v1/responses/{events[0]['response']['id']}"
    for number in range(len(events)):
        after = {"stream": "true", "starting_after": number}
        rest = response_events(await house.second.get(where, params=after), number + 1)
        assert rest == events[number + 1 :]
    assert (await house.second.get(where)).json() == events[-1]["response"]
    # How many tokens are in one depends on how fast they are read.
    assert "response.output_text.delta" in [event["type"] for event in events]


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


async def begin(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> list[Event]:
    """The first events of a stream, whose connection is then closed."""
    async with http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        events = read(answer)
        begun = [await anext(events) for _ in range(3)]
        await events.aclose()
    return begun


async def test_without_a_key_a_call_ends_with_its_connection(house: House) -> None:
    """What there is of it can be read all the same."""
    begun = await begin(house.first, LONG, {})
    url = f"/v1/streams/{begun[-1].event_id.partition('.')[0]}"
    rest = stream_of(await house.second.get(url, params={"after": begun[-1].event_id}))
    (choice,) = Recorded([*begun, *rest]).choices.values()
    assert choice["reasons"] == ["abort"]


async def test_a_keyed_stream_goes_on_and_resumes(house: House) -> None:
    begun = await begin(house.first, SHORT, KEY)
    last = {"Last-Event-ID": begun[-1].event_id}
    rest = stream_of(await house.second.post(COMPLETIONS, json=SHORT, headers=KEY | last))
    (choice,) = Recorded([*begun, *rest]).choices.values()
    assert choice["reasons"] == ["length"]
    # And from the beginning on.
    again = stream_of(await house.first.post(COMPLETIONS, json=SHORT, headers=KEY))
    assert Recorded(again).choices[0]["texts"] == choice["texts"]
    assert {event.event_id.partition(".")[0] for event in again} == {
        begun[0].event_id.partition(".")[0]
    }


@pytest.mark.parametrize("settings", [{"gateway__resume_grace_s": 0.2}])
async def test_a_resumable_stream_ends_after_its_grace(house: House) -> None:
    begun = await begin(house.first, LONG, KEY)
    answer_id = begun[0].event_id.partition(".")[0]
    async with aclosing(house.pipeline.client.follow(answer_id)) as outputs:
        async for output in outputs:
            last = output
    assert last.status == "cancelled"
    again = stream_of(await house.second.post(COMPLETIONS, json=LONG, headers=KEY))
    assert Recorded(again).choices[0]["reasons"] == ["abort"]


async def test_a_stream_is_cancelled_at_the_other_gateway(house: House) -> None:
    async with house.first.stream("POST", COMPLETIONS, json=LONG) as answer:
        events = read(answer)
        begun = [await anext(events) for _ in range(3)]
        url = f"/v1/streams/{begun[0].event_id.partition('.')[0]}"
        assert (await house.second.delete(url)).status_code == 200
        begun += [event async for event in events]
    assert Recorded(begun).choices[0]["reasons"] == ["abort"]

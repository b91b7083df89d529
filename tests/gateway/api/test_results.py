"""`/v1/results`: results by prefix or tag, over SSE and WebSocket, for their own tenant only."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from nano_inference.bus import open_bus
from nano_inference.bus.memory.results import MemoryResults
from nano_inference.bus.public import Completion, ErrorInfo, GenerateRequest, Output, Recipe
from nano_inference.config import BusConfig, load_config
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.server.server import HttpServer

from ..fake import FakeEngine, app_of, completion
from ..policy.spoken import Spoken
from ..sampled import ids as ids_of
from ..served import listening

DUPLICATE = ErrorInfo(code="duplicate_request", message="in use")


class Results(MemoryResults):
    """Results that the fake engine adds no more to."""

    def __init__(self) -> None:
        super().__init__()
        self.last_outputs: dict[str, Output] = {}


class Place:
    """A gateway, and results on its bus."""

    def __init__(self, engine: FakeEngine, app: Any, port: int) -> None:
        self.app, self.url, self.results = app, f"localhost:{port}", Results()
        self.engine = engine
        engine.bus.results = self.results  # type: ignore[assignment]
        self.http = httpx.AsyncClient(base_url=f"http://{self.url}", trust_env=False)
        self._ended = 0

    async def key(self, tenant: str, **fields: Any) -> dict[str, str]:
        """The header with a new key of a tenant."""
        wish = {"name": tenant, "tenant": tenant, "scopes": ["generate"], **fields}
        made = await Administration(self.app.policy.store).create_key(wish)
        return {"Authorization": f"Bearer {made['key']}"}

    async def end(self, *request_ids: str, **changed: Any) -> None:
        for each in request_ids:
            self._ended += 1
            done = Completion(request_id=each, entry_id=f"{self._ended}-1", status="done")
            await self.results.deliver([(done.entry_id, [replace(done, **changed)])])

    async def tagged(self, tag: str, headers: dict[str, str]) -> str:
        """The id of a call with a tag, whose request has ended."""
        body = {"model": "tiny", "prompt": "x"}
        headers = headers | {"X-Request-Tag": tag}
        answer = await self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        id: str = answer.json()["id"]
        assert self.engine.requests[-1].request_id == id
        await self.end(id)
        return id

    @asynccontextmanager
    async def sse(
        self, query: str, headers: dict[str, str], after: str = ""
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        headers = headers | ({"Last-Event-ID": after} if after else {})
        async with self.http.stream("GET", f"/v1/results?{query}", headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()

            async def events() -> AsyncIterator[dict[str, Any]]:
                id = ""
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        id = value
                    if name == "data":
                        event = json.loads(value)
                        assert event.get("position", id) == id
                        yield event

            yield events()

    @asynccontextmanager
    async def websocket(
        self, query: str, headers: dict[str, str], after: str = ""
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        query += f"&after={after}" if after else ""
        url = f"ws://{self.url}/v1/results?{query}"
        async with connect(url, additional_headers=headers, proxy=None, close_timeout=0.1) as made:

            async def events() -> AsyncIterator[dict[str, Any]]:
                async for message in made:
                    yield json.loads(message)

            yield events()


@pytest.fixture
async def place(engine: FakeEngine) -> AsyncIterator[Place]:
    settings = {"policy.backend": "bus", "gateway.message_format": "off"}
    config = load_config(env={}, overrides=settings)
    engine.outputs = lambda request: [completion(request)]
    app = app_of(engine, config)
    async with listening(HttpServer(app, config.gateway)) as port:
        place = Place(engine, app, port)
        async with place.http:
            yield place
    await app.aclose()


async def ids(events: AsyncIterator[dict[str, Any]], count: int) -> list[str]:
    found = [await anext(events) for _ in range(count)]
    assert {each["type"] for each in found} == {"result"}, found
    return [each["result"]["request_id"] for each in found]


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_results_by_prefix_go_on_after_a_cut(place: Place, transport: str) -> None:
    key, follow = await place.key("acme"), getattr(place, transport)
    async with follow("prefix=job-", key) as events:
        assert (await anext(events))["type"] == "open"
        await place.end("acme/job-1", "acme/other", "beta/job-1", "job-1")
        await place.end("acme/job-2")
        await place.end("acme/job-2", status="error", error=DUPLICATE)
        first, second = [await anext(events) for _ in range(2)]
        assert [each["result"]["request_id"] for each in (first, second)] == ["job-1", "job-2"]
    await place.end("acme/job-3")
    async with follow("prefix=job-", key, after=first["position"]) as events:
        await anext(events)
        await place.end("acme/job-4")
        assert await ids(events, 3) == ["job-2", "job-3", "job-4"]


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_a_tag_is_of_its_own_tenant(place: Place, transport: str) -> None:
    key, other = await place.key("acme"), await place.key("beta")
    async with getattr(place, transport)("tag=run%207", key) as events:
        await anext(events)
        await place.tagged("run 7", other)
        await place.tagged("run 8", key)
        mine = await place.tagged("run 7", key)
        # Another tenant names a request like one with the tag.
        await place.end(f"beta/{mine}")
        recipe = Recipe(tenant="beta")
        await place.end(mine, recipe=recipe)
        last = await place.tagged("run 7", key)
        assert await ids(events, 2) == [mine, last]


async def test_results_of_models_outside_the_key_are_left_out(place: Place) -> None:
    key = await place.key("acme", models=["tiny"])
    async with place.sse("prefix=", key) as events:
        await anext(events)
        await place.end("acme/a", model="large")
        await place.end("acme/b", model="tiny")
        assert await ids(events, 1) == ["b"]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "invalid_results"),
        ("prefix=a&tag=b", "invalid_results"),
        ("tag=", "invalid_tag"),
        ("prefix=a&after=x", "invalid_position"),
        ("prefix=a&after=00000000-1", "results_lost"),
    ],
)
async def test_what_can_not_be_followed_is_refused(place: Place, query: str, code: str) -> None:
    key = await place.key("acme")
    answer = await place.http.get(f"/v1/results?{query}", headers=key)
    assert answer.json()["error"]["code"] == code
    assert answer.status_code == (410 if code == "results_lost" else 400)


async def test_the_block_list_cuts_results(place: Place) -> None:
    key = await place.key("acme")
    administration = Administration(place.app.policy.store)
    await administration.set_guardrails({"literals": ["sum is"]})
    made = Spoken(GenerateRequest(), 0, ids_of("the sum is 12")).whole()
    async with place.sse("prefix=", key) as events:
        await anext(events)
        await place.end("acme/a", samples=(made,), model="tiny")
        (cut,) = (await anext(events))["result"]["samples"]
        assert (cut["text"], cut["finish_reason"]) == ("the ", "content_filter")
        await place.end("acme/b", samples=(made,), model="elsewhere")
        assert (await anext(events))["error"]["code"] == "model_not_loaded"


async def test_lost_results_end_the_stream_with_an_error(place: Place) -> None:
    key = await place.key("acme")
    async with place.websocket("prefix=a", key) as events:
        await anext(events)
        # All at once: memory keeps fewer.
        await place.end(*(f"acme/a{n}" for n in range(1000)))
        event = await anext(events)
        assert (event["type"], event["status"], event["error"]["code"]) == (
            *("error", 410, "results_lost"),
        )


async def test_named_requests_have_no_tag(place: Place) -> None:
    headers = await place.key("acme") | {"X-Request-Tag": "t"}
    for path, body in (
        ("/generate", {"text": "x", "rid": "r"}),
        ("/v1/requests", {"prompt": "x", "request_id": "r"}),
    ):
        answer = await place.http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_tag")


@pytest.mark.slow
@pytest.mark.soak
async def test_ten_thousand_results_come_once_each_over_cuts(
    place: Place, redis_url: str, soak: bool
) -> None:
    """On one connection at a time, cut in the middle of a read, while results go on to end; the
    short form has 300."""
    number, cuts = (10_000, 50) if soak else (300, 6)
    key, prefix = await place.key("acme"), f"test-{uuid.uuid4().hex[:8]}"
    config = BusConfig(url=redis_url, prefix=prefix, results_maxlen=4 * number)
    writer, reader = (open_bus(config, frozenset()) for _ in range(2))
    place.engine.bus.results = reader.results  # type: ignore[assignment]

    async def end_all() -> None:
        for first in range(0, number, 50):
            names = [f"acme/job-{n}" for n in range(first, first + 50)]
            foreign = [f"beta/{n}" for n in range(first, first + 50)]
            await writer.results.deliver(
                [
                    (each, [Completion(request_id=each, entry_id="1-1", status="done")])
                    for each in (*names, *foreign)
                ]
            )

    found: list[str] = []
    async with place.sse("prefix=job-", key) as events:
        position = (await anext(events))["position"]
    ending = asyncio.create_task(end_all())
    for cut in range(cuts):
        follow = place.websocket if cut % 2 else place.sse
        async with follow("prefix=job-", key, position) as events:
            await anext(events)
            while len(found) < number * (cut + 1) // cuts:
                event = await anext(events)
                position = event["position"]
                found.append(event["result"]["request_id"])
    await ending
    assert Counter(found) == Counter(f"job-{n}" for n in range(number))
    await writer.aclose()
    await reader.aclose()
    async with Redis.from_url(redis_url) as redis:
        async for name in redis.scan_iter(f"*{prefix}*"):
            await redis.delete(name)

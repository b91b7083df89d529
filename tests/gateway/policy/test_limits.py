"""Limits of callers, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from nano_inference.config import BusError, Config, load_config
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.store import PolicyStore
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.store.limits import Charge, Limit, LimitStore, Reservation

from ..errors import code_of
from ..fake import FakeEngine, app_of, chunk, http_of
from ..recorded import Recorded
from .conftest import Made, bearer

GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 10}}
COMPLETION = {"prompt": "abcdef", "max_tokens": 10}
MESSAGE = {"max_tokens": 10, "messages": [{"role": "user", "content": "a"}], "model": "tiny"}


class Place:
    """Two gateways over one bus, or with limits of their own."""

    def __init__(self, config: Config, limits: Sequence[LimitStore] = ()) -> None:
        self.engine, self.second = FakeEngine(), FakeEngine()
        self.recorded = Recorded()
        self.limits = limits or [self.engine.bus.store.limits] * 2
        self.stores: list[PolicyStore] = []
        self.http: list[httpx.AsyncClient] = []
        for engine, own in zip((self.engine, self.second), self.limits, strict=True):
            engine.bus.store = replace(self.engine.bus.store, limits=own)
            app = app_of(engine, config, self.recorded.measures)
            self.stores.append(app.policy.store)
            self.http.append(http_of(ObservedCalls(app, self.recorded.measures, [])))
        self.administration = Administration(self.stores[0])

    async def key(self, *scopes: str, **fields: Any) -> dict[str, str]:
        """The header of a new key, known to both gateways."""
        headers = bearer(await Made(self.administration)(*scopes, **fields))
        await self.refresh()
        return headers

    async def aclose(self) -> None:
        for each in self.http:
            await each.aclose()

    async def refresh(self) -> None:
        for store in self.stores:
            await store.refresh()

    async def call(self, headers: dict[str, str], gateway: int = 0, **body: Any) -> httpx.Response:
        return await self.http[gateway].post(
            "/v1/completions", json=COMPLETION | body, headers=headers
        )

    async def left(self, name: str, most: int, window_s: int = 60) -> int:
        """The room left in a limit."""
        reservation = await self.limits[0].reserve([Charge(Limit(name, most, window_s), 0)])
        return reservation.rooms[0].left


@pytest.fixture
async def place(config: Config) -> AsyncIterator[Place]:
    made = Place(config)
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", GENERATE), ("/v1/completions", COMPLETION), ("/v1/messages", MESSAGE)],
)
async def test_every_interface_has_rate_limit_headers(
    place: Place, path: str, body: dict[str, Any]
) -> None:
    limits = {"requests_per_minute": 1, "tokens_per_minute": 5000}
    headers = await place.key("generate", limits=limits)
    taken, refused = [await place.http[0].post(path, json=body, headers=headers) for _ in range(2)]
    assert (taken.status_code, refused.status_code) == (200, 429)
    for answer in (taken, refused):
        stands = {
            name.removeprefix("x-ratelimit-"): value
            for name, value in answer.headers.items()
            if name.startswith("x-ratelimit-")
        }
        assert stands.keys() == {
            f"{what}-{of}"
            for what in ("limit", "remaining", "reset")
            for of in ("requests", "tokens")
        }
        assert (stands["limit-requests"], stands["remaining-requests"]) == ("1", "0")
        assert 0 < float(stands["reset-requests"].removesuffix("s")) <= 61
        assert 4900 < int(stands["remaining-tokens"]) < 5000
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_streams_have_rate_limit_headers(place: Place) -> None:
    headers = await place.key("generate", limits={"requests_per_minute": 1})
    answer = await place.call(headers, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert code_of(await place.call(headers, stream=True), 429) == "rate_limit_exceeded"


async def test_background_responses_reserve_limits(place: Place) -> None:
    headers = await place.key("generate", limits={"requests_per_minute": 1, "max_in_flight": 5})
    key_id = headers["Authorization"].split("-")[1]
    body = {"input": "a", "background": True, "max_output_tokens": 20}
    place.engine.outputs = lambda request: []
    begun = await place.http[0].post("/v1/responses", json=body, headers=headers)
    assert begun.status_code == 200
    assert begun.headers["x-ratelimit-remaining-requests"] == "0"
    assert await place.left(f"key:{key_id}:in_flight", 5, 0) == 4
    refused = await place.http[0].post("/v1/responses", json=body, headers=headers)
    assert code_of(refused, 429) == "rate_limit_exceeded"


async def test_tokens_are_reserved_and_committed(place: Place) -> None:
    """A prompt of six letters may be two tokens, and each of two samples has at most ten."""
    headers = await place.key("generate", limits={"tokens_per_minute": 50})
    answer = await place.call(headers, n=2)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(50 - 22)
    assert answer.json()["usage"]["total_tokens"] == 8
    answer = await place.call(headers, gateway=1)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(50 - 8 - 12)


@pytest.mark.parametrize(("stream", "used"), [(True, 2 + 3), (False, 2 + 10)])
async def test_a_disconnected_call_commits_its_most_tokens(
    place: Place, stream: bool, used: int
) -> None:
    """A stream commits the tokens that were sent; a whole answer the most that it may have."""
    place.engine.outputs = lambda request: [chunk(request, (5, 6, 7), "five six")]
    limits = {"tokens_per_minute": 50, "max_in_flight": 1}
    headers = await place.key("generate", tenant="t", limits=limits)
    key_id = headers["Authorization"].split("-")[1]
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 10}, "stream": stream}
    call = asyncio.create_task(place.http[0].post("/generate", json=body, headers=headers))
    await place.engine.until(lambda: bool(place.engine.requests))
    assert await place.left(f"key:{key_id}:tokens", 50) == 50 - 12
    assert code_of(await place.call(headers, gateway=1), 429) == "rate_limit_exceeded"
    assert place.recorded.refused() == {"max_in_flight": 1}
    call.cancel()
    await asyncio.wait([call])
    await place.engine.until(lambda: bool(place.engine.left))
    assert await place.left(f"key:{key_id}:in_flight", 1, 0) == 1
    assert await place.left(f"key:{key_id}:tokens", 50) == 50 - used


async def test_a_call_above_the_limit_has_no_retry_after(place: Place) -> None:
    headers = await place.key("generate", limits={"tokens_per_minute": 20})
    refused = await place.call(headers, n=2)
    assert code_of(refused, 400) == "tokens_above_limit"
    assert "22 tokens" in refused.json()["error"]["message"]
    assert place.recorded.refused() == {"tokens_per_minute": 1}
    assert (await place.call(headers, n=1)).status_code == 200
    assert place.engine.requests[0].n == 1


async def test_all_keys_of_a_tenant_share_its_limit(place: Place) -> None:
    keys = [
        await place.key("generate", tenant="t", limits={"requests_per_minute": most})
        for most in (2, 10)
    ]
    await place.administration.set_tenant("t", {"limits": {"requests_per_minute": 4}})
    await place.refresh()
    codes = [(await place.call(keys[0])).status_code for _ in range(3)]
    assert codes == [200, 200, 429], "its own limit"
    answers = [await place.call(keys[1], gateway=1) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert "this tenant's limit of 4 calls" in answers[-1].json()["error"]["message"]
    # A call refused by one limit reserves nothing in another.
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "0"
    assert (await place.call(await place.key("generate", tenant="u"))).status_code == 200


async def test_a_changed_limit_applies_to_earlier_use(place: Place) -> None:
    headers = await place.key("generate", limits={"requests_per_minute": 5})
    key_id = headers["Authorization"].split("-")[1]
    assert (await place.call(headers)).status_code == 200
    await place.administration.change_key(key_id, {"limits": {"requests_per_minute": 1}})
    await place.refresh()
    assert code_of(await place.call(headers, gateway=1), 429) == "rate_limit_exceeded"


class Away:
    """Limits that can't be reached."""

    async def reserve(self, charges: list[Charge]) -> Reservation:
        raise BusError("it is away")


@pytest.mark.parametrize("choice", ["closed", "open"])
async def test_limits_that_can_not_be_counted(choice: str) -> None:
    """The setting applies to callers with limits only."""
    overrides = {"policy.backend": "bus", "policy.limits_when_bus_fails": choice}
    away = cast(LimitStore, Away())
    place = Place(load_config(env={}, overrides=overrides), [away, away])
    answer = await place.call(await place.key("generate", limits={"max_in_flight": 5}))
    if choice == "open":
        assert answer.status_code == 200
    else:
        assert code_of(answer, 503) == "policy_unavailable"
        assert place.recorded.refused() == {"limits_unavailable": 1}
    assert (await place.call(await place.key("generate"))).status_code == 200
    await place.aclose()


async def test_a_resumed_stream_reserves_nothing(place: Place) -> None:
    headers = await place.key("generate", limits={"requests_per_minute": 1})
    recorded = await place.call(headers, stream=True)
    event_id = next(line for line in recorded.text.splitlines() if line.startswith("id: "))[4:]
    stream = f"/v1/streams/{event_id.partition('.')[0]}"
    again = await place.http[0].get(stream, headers=headers)
    assert (again.status_code, again.text) == (200, recorded.text)
    assert code_of(await place.call(headers), 429) == "rate_limit_exceeded"


async def test_an_embedding_reserves_its_prompt_only(place: Place) -> None:
    """Two tokens as an estimate, with nothing to be generated after them."""
    headers = await place.key("generate", limits={"tokens_per_minute": 2})
    place.engine.outputs = lambda request: []
    call = asyncio.create_task(
        place.http[0].post("/v1/embeddings", json={"input": "abcdef"}, headers=headers)
    )
    await place.engine.until(lambda: bool(place.engine.requests))
    longer = {"input": "abcdefghijkl"}
    refused = await place.http[1].post("/v1/embeddings", json=longer, headers=headers)
    assert code_of(refused, 400) == "tokens_above_limit"
    call.cancel()
    await asyncio.wait([call])

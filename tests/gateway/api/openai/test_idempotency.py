"""A call that is sent again with its key is not made again, whoever gets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nano_inference.bus.public import ErrorInfo, GenerateRequest, Output
from nano_inference.gateway.call import Call
from nano_inference.gateway.serving.begun_calls import keyed

from ...fake import Client, FakeEngine, completion, refused, sample
from .streamed import Recorded, stream_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT: dict[str, Any] = {"prompt": "98 +", "n": 2}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "n": 2}
KEY = {"Idempotency-Key": "k-1", "X-Tenant": "me"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, TEXT)])
async def test_the_same_call_is_made_once(
    http: Client, other: Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    asked = body | {"stream": stream}
    again = dict(reversed(asked.items()))
    answers = [
        await client.post(path, json=each, headers=KEY)
        for client, each in ((http, asked), (other, again), (http, asked))
    ]
    assert len(http.engine.requests) == 1
    told = [vars(Recorded(stream_of(each))) if stream else each.json() for each in answers]
    assert told[1:] == told[:1] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_two_at_once_are_one(http: Client, other: Client, stream: bool) -> None:
    """Both at different gateways, and while the first one still runs."""
    go, followed = asyncio.Event(), asyncio.Semaphore(0)

    class Slow(FakeEngine):
        async def follow(self, *given: Any, **named: Any) -> Any:
            followed.release()
            await go.wait()
            async for output in super().follow(*given, **named):
                yield output

    http.engine.__class__ = Slow
    asked = TEXT | {"stream": stream}
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(client.post(COMPLETIONS, json=asked, headers=KEY))
            for client in (http, other, http, other)
        ]
        for _ in calls:
            await followed.acquire()
        go.set()
    assert len(http.engine.requests) == 1
    told = [
        vars(Recorded(stream_of(each.result()))) if stream else each.result().json()
        for each in calls
    ]
    assert told[1:] == told[:1] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, TEXT | {"temperature": 0.5}),
        (COMPLETIONS, TEXT | {"stream": True}),
        (COMPLETIONS, TEXT | {"user": "x"}),
        (CHAT, HELLO),
    ],
)
async def test_a_key_belongs_to_one_body(http: Client, path: str, body: dict[str, Any]) -> None:
    assert (await http.post(COMPLETIONS, json=TEXT, headers=KEY)).status_code == 200
    answer = await http.post(path, json=body, headers=KEY)
    assert (answer.status_code, len(http.engine.requests)) == (422, 1)
    assert answer.json()["error"]["code"] == "idempotency_key_reused"


async def test_a_key_is_its_tenants(http: Client) -> None:
    ids = set()
    for tenant in ("me", "other"):
        answer = await http.post(COMPLETIONS, json=TEXT, headers=KEY | {"X-Tenant": tenant})
        ids.add(answer.json()["id"])
    assert len(ids) == len(http.engine.requests) == 2


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "caf\xe9", "\t"])
async def test_keys_are_bounded(http: Client, key: str) -> None:
    headers = [("Idempotency-Key", key.encode("latin-1"))]
    answer = await http.post(COMPLETIONS, json=TEXT, headers=headers)
    assert (answer.status_code, http.engine.requests) == (400, [])
    assert answer.json()["error"]["code"] == "invalid_idempotency_key"
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    assert (await http.post(COMPLETIONS, json=TEXT, headers=twice)).status_code == 400


async def test_a_refused_call_may_be_repeated(http: Client) -> None:
    late = await http.post(COMPLETIONS, json=TEXT, headers=KEY | {"X-Budget-Ms": "0"})
    assert (late.status_code, http.engine.requests) == (504, [])
    assert (await http.post(COMPLETIONS, json=TEXT, headers=KEY)).status_code == 200
    assert len(http.engine.requests) == 1


async def test_a_call_that_has_failed_is_made_anew(http: Client, other: Client) -> None:
    """Any number of times, until one has an answer; that is kept."""
    works, http.engine.outputs = http.engine.outputs, refused("lane_failed")
    for client in (http, other):
        answer = await client.post(COMPLETIONS, json=TEXT, headers=KEY)
        assert answer.json()["error"]["code"] == "lane_failed"
    changed = await http.post(COMPLETIONS, json=TEXT | {"seed": 1}, headers=KEY)
    assert (changed.status_code, len(http.engine.requests)) == (422, 2)
    http.engine.outputs = works
    ids = {
        (await client.post(COMPLETIONS, json=TEXT, headers=KEY)).json()["id"]
        for client in (http, other)
    }
    assert (len(ids), len(http.engine.requests)) == (1, 3)


async def test_a_call_that_ended_without_its_client_is_made_anew(http: Client) -> None:
    """Its client was away for longer than the grace; one that was cancelled stays as it is."""
    works, http.engine.outputs = http.engine.outputs, _cancelled
    first = (await http.post(COMPLETIONS, json=TEXT, headers=KEY)).json()
    assert first["choices"][0]["finish_reason"] == "abort"
    http.engine.outputs = works
    second = (await http.post(COMPLETIONS, json=TEXT, headers=KEY)).json()
    assert second["choices"][0]["finish_reason"] != "abort"
    http.engine.outputs, key = _cancelled, KEY | {"Idempotency-Key": "k-2"}
    ended = (await http.post(COMPLETIONS, json=TEXT, headers=key)).json()
    await http.delete(f"/v1/streams/{ended['id']}", headers=KEY)
    assert (await http.post(COMPLETIONS, json=TEXT, headers=key)).json() == ended
    assert len(http.engine.requests) == 3


def _cancelled(request: GenerateRequest) -> list[Output]:
    error = ErrorInfo(code="cancelled", message="no")
    samples = [sample(sample_index=index, finish_reason="abort") for index in range(request.n)]
    return [completion(request, *samples, status="cancelled", error=error)]


async def test_a_stream_is_resumed_by_the_same_call_with_its_key(
    http: Client, other: Client
) -> None:
    body = TEXT | {"stream": True}
    told = stream_of(await http.post(COMPLETIONS, json=body, headers=KEY))
    last = {"Last-Event-ID": told[1].event_id}
    rest = stream_of(await other.post(COMPLETIONS, json=body, headers=KEY | last))
    assert vars(Recorded([*told[:2], *rest])) == vars(Recorded(told))
    changed = await other.post(COMPLETIONS, json=body | {"seed": 1}, headers=KEY | last)
    assert changed.status_code == 422
    stranger = await other.post(
        COMPLETIONS, json=body, headers=KEY | last | {"Idempotency-Key": "k-2"}
    )
    assert (stranger.status_code, len(http.engine.requests)) == (422, 1)


def test_no_two_keys_have_one_name() -> None:
    def asked(tenant: str, key: str) -> Call:
        headers = {b"idempotency-key": key, b"x-tenant": tenant}
        return Call(path="/y", headers=[(name, value.encode()) for name, value in headers.items()])

    pairs = [("a", "bc"), ("ab", "c"), ("abc", "-"), ("a", "b"), ("b", "a")]
    found = {keyed(asked(tenant, key), {}) for tenant, key in pairs}
    assert len({each.name for each in found if each}) == len(pairs)

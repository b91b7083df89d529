"""A client that comes back to a stream gets what it has not had, at any gateway."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import BusError
from nano_inference.gateway.serving import begun_calls

from ...fake import Client, FakeEngine, refused
from ...made import interleaved
from .streamed import Recorded, events, stream_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}
TEXT: dict[str, Any] = {"prompt": "98 +", "stream": True}
MINE = {"X-Tenant": "me"}
ALL: dict[str, Any] = {
    "n": 3,
    "return_token_ids": True,
    "return_weight_versions": True,
    "stream_options": {"include_usage": True},
}
BODIES = [
    (CHAT, HELLO),
    (CHAT, HELLO | ALL | {"logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, TEXT),
    (COMPLETIONS, TEXT | ALL | {"logprobs": 1, "echo": True}),
    (COMPLETIONS, TEXT | ALL | {"prompt": ["98 +", [5, 6, 7]]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_another_gateway_resumes_after_each_event(
    http: Client, other: Client, path: str, body: dict[str, Any]
) -> None:
    """By GET, by the header, and by the same POST again, which publishes nothing."""
    told = stream_of(await http.post(path, json=body, headers=MINE))
    wanted, published = vars(Recorded(told)), len(http.engine.requests)
    answer_id = told[0].event_id.partition(".")[0]
    for number, event in enumerate(told, 1):
        last = {"Last-Event-ID": event.event_id} | MINE
        url = f"/v1/streams/{answer_id}"
        answers = [
            await other.get(url, params={"after": event.event_id}, headers=MINE),
            await other.get(url, headers=last),
            await other.post(path, json=body, headers=last),
        ]
        for answer in answers:
            assert vars(Recorded([*told[:number], *stream_of(answer)])) == wanted
    whole_again = stream_of(await other.get(f"/v1/streams/{answer_id}", headers=MINE))
    assert vars(Recorded(whole_again)) == wanted
    assert len(http.engine.requests) == published


async def test_resuming_publishes_unpublished_requests(
    http: Client, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway was killed when it had begun the first of two prompts."""
    monkeypatch.setattr(begun_calls, "PUBLISH_PATIENCE_S", 0.0)
    told = stream_of(await http.post(COMPLETIONS, json=TEXT | {"prompt": ["a", "b"]}))
    answer_id = told[0].event_id.partition(".")[0]
    (first, second) = http.engine.requests
    kept = await http.engine.bus.store.calls.read(answer_id)
    await http.engine.bus.store.calls.drop(answer_id)
    await http.engine.bus.store.calls.keep(answer_id, kept.record, 10)
    await http.engine.bus.store.calls.note(answer_id, first.request_id, "1-0")
    http.engine.requests = [first]
    answer = await other.get(f"/v1/streams/{answer_id}")
    assert http.engine.requests == [first, second]
    assert {event.event_id for event in stream_of(answer)} >= {told[-1].event_id}


async def test_a_resumed_stream_repeats_the_error(http: Client, other: Client) -> None:
    """The bus was away for a moment: what was told as an error is none any more."""
    http.engine.away = True
    told = stream_of(await http.post(COMPLETIONS, json=TEXT))
    assert told[-2].data["error"]["code"] == "bus_unavailable"
    last_id = told[-1].event_id
    assert {event.event_id for event in told} == {last_id}
    http.engine.away = False
    rest = events(await other.get(f"/v1/streams/{last_id.partition('.')[0]}?after={last_id}"))
    assert "".join(each["choices"][0]["text"] for each in rest) == " six seven"
    assert "cancel" not in http.engine.names


@pytest.mark.parametrize("path", ["/v1/streams/cmpl-0", "/v1/streams/x%2Fy", "/v1/streams/%00"])
async def test_an_unknown_stream_is_not_found(http: Client, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["code"] in ("stream_not_found", "not_found")


async def test_another_tenants_stream_is_not_found(http: Client) -> None:
    told = stream_of(await http.post(COMPLETIONS, json=TEXT, headers=MINE))
    answer_id = told[0].event_id.partition(".")[0]
    for headers in ({}, {"X-Tenant": "other"}, {"X-Tenant": "other", "Last-Event-ID": "nonsense"}):
        answer = await http.get(f"/v1/streams/{answer_id}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")
    again = await http.post(
        COMPLETIONS, json=TEXT, headers={"X-Tenant": "other", "Last-Event-ID": told[0].event_id}
    )
    assert (again.status_code, len(http.engine.requests)) == (404, 1)


async def test_a_stream_whose_results_are_gone_is_not_found(http: Client) -> None:
    class Gone(FakeEngine):
        async def follow(self, *given: Any, **named: Any) -> Any:
            raise BusError("gone", code="unknown_request")
            yield

    told = stream_of(await http.post(COMPLETIONS, json=TEXT))
    http.engine.__class__ = Gone
    answer = await http.get(f"/v1/streams/{told[0].event_id.partition('.')[0]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


@pytest.mark.parametrize("event_id", ["nonsense", "{id}", "{id}.x.x", "{id}.1.u.u", "cmpl-1.x"])
async def test_an_event_of_no_stream_is_refused(http: Client, event_id: str) -> None:
    told = stream_of(await http.post(COMPLETIONS, json=TEXT))
    answer_id = told[0].event_id.partition(".")[0]
    after = event_id.format(id=answer_id)
    answer = await http.get(f"/v1/streams/{answer_id}", params={"after": after})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_event_id")


async def test_records_of_another_version_are_not_found(http: Client) -> None:
    for record in (b"", b"\xff", b"\x81\xa4call\x01"):
        await http.engine.bus.store.calls.keep("cmpl-1", record, 1)
        answer = await http.get("/v1/streams/cmpl-1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


async def test_an_answer_in_one_piece_is_no_stream(http: Client) -> None:
    answer = await http.post(COMPLETIONS, json=TEXT | {"stream": False})
    assert (await http.get(f"/v1/streams/{answer.json()['id']}")).status_code == 404


async def test_a_refused_duplicate_entry_leads_to_the_first_entry(
    http: Client,
) -> None:
    """Two gateways have published the same request."""

    class Doubled(FakeEngine):
        async def follow(self, request_id: str, entry_id: str = "", **named: Any) -> Any:
            (request,) = self.requests
            no = refused("duplicate_request")
            for output in no(request) if entry_id else interleaved(request):
                yield output

    http.engine.__class__ = Doubled
    told = events(await http.post(COMPLETIONS, json=TEXT))
    assert "".join(each["choices"][0]["text"] for each in told) == "five six seven"

"""Chunks of a stream, as clients put them together again."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from nano_inference.config import Config
from nano_inference.gateway.api.openai.answers import ChoicesWriter
from nano_inference.gateway.api.openai.requests import read_completion
from nano_inference.gateway.api.openai.streams import Chunks

from ... import by_hand
from ...fake import Client, FakeEngine, app_of, completion, http_of, refused
from ...made import TEXTS, TOKENS, cut, interleaved, told
from .streamed import Recorded, choices, events, stream_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}
TEXT: dict[str, Any] = {"prompt": "98 +", "stream": True}


async def test_roles_come_once_first_and_in_order(http: Client) -> None:
    chunks = events(await http.post(CHAT, json=HELLO | {"n": 3}))
    first = [each for chunk in chunks[:3] for each in chunk["choices"]]
    assert [each["index"] for each in first] == [0, 1, 2]
    assert all(each["delta"] == {"role": "assistant", "content": ""} for each in first)
    for index in range(3):
        _, *rest = choices(chunks, index)
        assert "".join(each["delta"].get("content", "") for each in rest) == "".join(TEXTS)
        assert not any("role" in each["delta"] for each in rest)
        reasons = [each["finish_reason"] for each in rest]
        assert reasons == [None] * (len(rest) - 1) + ["stop"]


async def test_all_chunks_name_their_answer(http: Client) -> None:
    chunks = events(await http.post(CHAT, json=HELLO | {"return_token_ids": True}))
    (request,) = http.engine.requests
    assert chunks[0]["prompt_token_ids"] == list(request.prompt_token_ids or ())
    assert {chunk["id"] for chunk in chunks} == {request.request_id}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    # Each of the weights that made it.
    assert [chunk["system_fingerprint"] for chunk in chunks][-1] == "weights-4"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, TEXT)])
async def test_usage_is_sent_only_on_request(
    http: Client, path: str, body: dict[str, Any], options: Any
) -> None:
    chunks = events(await http.post(path, json=body | {"stream_options": options}))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, TEXT)])
async def test_usage_is_in_the_last_chunk_which_has_no_choices(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    asked = body | {"stream_options": {"include_usage": True}, "n": 2}
    *chunks, last = events(await http.post(path, json=asked))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 6)


async def test_usage_in_every_chunk(http: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(await http.post(COMPLETIONS, json=TEXT | {"stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


async def test_logprobs_and_tokens_are_those_of_the_text_in_one_piece(http: Client) -> None:
    asked = {"logprobs": 2, "return_token_ids": True, "return_weight_versions": True, "n": 2}
    asked |= {"echo": True}
    told = Recorded(stream_of(await http.post(COMPLETIONS, json=TEXT | asked)))
    answer = (await http.post(COMPLETIONS, json=TEXT | asked | {"stream": False})).json()
    for index, whole in enumerate(answer["choices"]):
        found = told.choices[index]
        assert found["texts"] == [whole["text"]]
        assert found["logprobs"] == list(zip(*whole["logprobs"].values(), strict=True))
        assert found["tokens"] == whole["token_ids"]
        assert found["prompts"] == [whole["prompt_token_ids"]]
        assert found["versions"] == [(3, 0), (3, 1), (4, 2)]


async def test_the_end_has_the_rest_after_the_chunks(http: Client) -> None:
    http.engine.outputs = lambda request: [
        *cut(request),
        completion(request, told(request, 0, "abort"), status="cancelled"),
    ]
    asked = TEXT | {"return_token_ids": True, "return_weight_versions": True}
    parts = choices(events(await http.post(COMPLETIONS, json=asked)), 0)
    assert "".join(part["text"] for part in parts) == "".join(TEXTS)
    assert [each for part in parts for each in part["token_ids"]] == list(TOKENS)
    assert parts[-1]["weight_versions"] == [
        {"version": 3, "start": 1, "end": 2},
        {"version": 4, "start": 2, "end": 3},
    ]
    assert [part["finish_reason"] for part in parts] == [None, "abort"]


async def test_an_error_after_a_comment_is_an_event(engine: FakeEngine) -> None:
    failed = anyio.Event()

    class Slow(FakeEngine):
        async def follow(self, request_id: str, *_: Any, **__: Any) -> Any:
            await failed.wait()
            for output in refused("lane_failed")(self.requests[0]):
                yield output

    app = app_of(Slow(), {"gateway.comment_s": 0.01})
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            sent.append(message["body"])
            failed.set()

    await by_hand.post(app, COMPLETIONS, {"prompt": "a", "stream": True}, send)
    text = b"".join(sent)
    assert text.startswith(b": keep-alive\n\n")
    assert b'"code":"lane_failed"' in text
    assert text.endswith(b"data: [DONE]\n\n")


async def test_unread_tokens_become_one_chunk() -> None:
    call, prompts = read_completion({"prompt": "a", "stream": True, "n": 2}, Config())
    sent: list[dict[str, Any]] = []
    reads = anyio.Event()

    async def send(data: bytes, event_id: str = "") -> None:
        sent.append(json.loads(data))
        await reads.wait()

    chunks = Chunks(ChoicesWriter(call, prompts, ["a"], None), send)
    outputs = interleaved(call.request(0, 1, "a", "t"))
    async with anyio.create_task_group() as group:
        group.start_soon(chunks.send_all)
        for output in outputs:
            chunks.put(0, output)
            await anyio.wait_all_tasks_blocked()
        reads.set()
        chunks.close()
    for index in range(2):
        assert "".join(each["text"] for each in choices(sent, index)) == "".join(TEXTS)
    # The chunk that was being sent, what came of the same choice meanwhile, and all of the other.
    assert len(sent) == 3


PLAIN, SSE = {"Accept": "*/*"}, {"Accept": "text/event-stream"}


@pytest.mark.parametrize(
    ("setting", "headers", "has_ids"),
    [
        (False, SSE, False),
        (True, PLAIN, True),
        ("auto", PLAIN, False),
        ("auto", SSE, True),
        ("auto", PLAIN | {"Idempotency-Key": "k"}, True),
    ],
)
async def test_events_have_ids_for_clients_that_read_them(
    engine: FakeEngine, setting: bool | str, headers: dict[str, str], has_ids: bool
) -> None:
    """Load generators, such as vLLM's, fail on lines that don't begin with "data: "."""
    async with http_of(app_of(engine, {"gateway.event_ids": setting})) as client:
        text = (await client.post(COMPLETIONS, json=TEXT, headers=headers)).text
        assert text.endswith("data: [DONE]\n\n")
        assert {part.startswith("id: ") for part in text.split("\n\n")[:-1]} == {has_ids}
        if setting == "auto" and has_ids:
            last = text.split()[1]
            url = f"/v1/streams/{last.partition('.')[0]}"
            for answer in (
                await client.get(url, headers=PLAIN),
                await client.post(
                    COMPLETIONS, json=TEXT, headers=headers | PLAIN | {"Last-Event-ID": last}
                ),
            ):
                assert answer.text.startswith("id: ")

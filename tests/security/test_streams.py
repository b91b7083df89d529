"""A stream that repeats what came before costs about as much as the answer is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from nano_inference.bus.public import GenerateRequest, Output, TokenLogprob
from nano_inference.config import Config
from nano_inference.gateway.api.sglang.answers import EVERY_TOKEN_BYTES, GROWTH, PromptWriter
from nano_inference.gateway.app import make_app
from nano_inference.text.detokenizer import Detokenizer

from ..gateway import by_hand
from ..gateway.fake import FakeEngine, chunk, completion, sample

LIMIT_S = 20
TURNS = 10_000
LONG = 3000


def spelling(tokens: int) -> Callable[[GenerateRequest], list[Output]]:
    """Answers each sample with so many tokens, one by one."""

    def outputs(request: GenerateRequest) -> list[Output]:
        top = (TokenLogprob(token_id=40, logprob=-1.0),)
        tops = (top,) * min(1, request.sampling.logprobs)
        part = partial(chunk, request, (40,), "abcde", top_logprobs=tops)
        chunks: list[Output] = [
            part(sample_index=index, token_offset=place)
            for place in range(tokens)
            for index in range(request.n)
        ]
        scores = {"logprobs": (-1.0,) * tokens, "top_logprobs": (top,) * tokens}
        whole = partial(sample, (40,) * tokens, text="abcde" * tokens, **scores)
        made = [whole(sample_index=index) for index in range(request.n)]
        return [*chunks, completion(request, *made)]

    return outputs


def events(raw: bytes) -> list[bytes]:
    *lines, done, end = raw.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [line.removeprefix(b"data: ") for line in lines]


async def stream(http: httpx.AsyncClient, **body: Any) -> list[bytes]:
    answer = await http.post("/generate", json={"text": "a", "stream": True} | body)
    return events(answer.content)


WITH_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}


@pytest.mark.parametrize("more", [{}, WITH_LOGPROBS])
async def test_all_events_together_are_a_few_times_the_last(
    http: httpx.AsyncClient, engine: FakeEngine, more: dict[str, Any]
) -> None:
    engine.outputs = spelling(LONG)
    found = await stream(http, **more)
    last = json.loads(found[-1])
    assert len(last["output_ids"]) == LONG
    assert last["text"] == "abcde" * LONG
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    short = [event for event in found if len(event) <= EVERY_TOKEN_BYTES]
    # At every token while they are short.
    assert [len(json.loads(event)["output_ids"]) for event in short] == list(
        range(1, len(short) + 1)
    )
    long = sum(map(len, found)) - sum(map(len, short))
    assert long <= (GROWTH + 3) * len(found[-1])
    assert len(found) < len(short) + 100


async def test_every_event_includes_the_text_before(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.outputs = spelling(LONG)
    found = [json.loads(event) for event in await stream(http, **WITH_LOGPROBS)]
    sizes = [len(event["output_ids"]) for event in found]
    assert sizes == sorted(sizes)
    for event, size in zip(found, sizes, strict=True):
        assert event["text"] == "abcde" * size
        assert len(event["meta_info"]["output_token_logprobs"]) == size
        assert len(event["meta_info"]["output_top_logprobs"]) == size
        assert event["meta_info"]["completion_tokens"] == size


@pytest.mark.parametrize(
    "params",
    [
        {"no_stop_trim": True},
        {"skip_special_tokens": False, "stop": ["xyz"]},
        {"skip_special_tokens": False, "stop": ["xyz"], "min_new_tokens": LONG // 2},
    ],
)
async def test_each_token_is_looked_at_a_few_times(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed = written = 0
    push, entry = Detokenizer.push, PromptWriter._entry

    def counted_push(self: Detokenizer, token_ids: Any) -> str:
        nonlocal pushed
        pushed += len(token_ids)
        return push(self, token_ids)

    def counted_entry(self: PromptWriter, logprob: float | None, token_id: int) -> Any:
        nonlocal written
        written += 1
        return entry(self, logprob, token_id)

    monkeypatch.setattr(Detokenizer, "push", counted_push)
    monkeypatch.setattr(PromptWriter, "_entry", counted_entry)
    engine.outputs = spelling(LONG)
    found = await stream(http, sampling_params=params, **WITH_LOGPROBS)
    assert len(found) > 20
    assert pushed <= 4 * LONG
    assert written <= 4 * LONG


async def test_a_stream_interval_is_kept(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.outputs = spelling(100)
    found = await stream(http, sampling_params={"stream_interval": 30})
    assert [len(json.loads(event)["output_ids"]) for event in found] == [1, 31, 61, 91, 100]


async def test_samples_grow_by_themselves(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.outputs = spelling(40)
    found = [
        json.loads(event) for event in await stream(http, text=["a", "b"], sampling_params={"n": 2})
    ]
    for index in range(4):
        own = [len(event["output_ids"]) for event in found if event["index"] == index]
        assert own == sorted(own)
        assert len(own) > 15
        assert own[-1] == 40


async def test_a_slow_client_gets_the_newest_and_nothing_is_kept_for_it(engine: FakeEngine) -> None:
    engine.outputs = spelling(300)
    received: list[bytes] = []
    may_read = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            received.append(message["body"])
            await may_read.wait()

    asked = {"text": ["a", "b"], "stream": True, "rid": ["r", "s"]}
    app = make_app(engine, Config())
    async with asyncio.timeout(LIMIT_S):
        answering = asyncio.create_task(by_hand.post(app, "/generate", asked, send))
        # Read to its end though the client has read one event.
        for _ in range(TURNS):
            if received and len(engine.ended) == 2:
                break
            await asyncio.sleep(0)
        assert len(engine.ended) == 2
        may_read.set()
        await answering
    assert engine.left == []
    found = [json.loads(event) for event in events(b"".join(received))]
    assert len(found) == 3
    assert {event["index"]: len(event["output_ids"]) for event in found} == {0: 300, 1: 300}

"""Prompts, too many or too long, are refused before they cost anything; others make room."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from nano_inference.bus import Malformed
from nano_inference.bus.codec import decode_request, encode_request
from nano_inference.gateway.serving.tokenizer import Tokenizer

from ..gateway.errors import error_of
from ..gateway.fake import FakeEngine
from .conftest import OpenHttp

LIMIT_S = 20
SHOW_PROMPT = {"return_logprob": True, "logprob_start_len": 0}


@contextmanager
def counted_calls(most: int) -> Iterator[None]:
    """Fails when more Python functions than that are called within."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert calls <= most


@pytest.mark.parametrize("prompts", [{"text": ["a"] * 200_000}, {"input_ids": [[1]] * 200_000}])
async def test_too_many_prompts_cost_nothing_each(
    http: httpx.AsyncClient, engine: FakeEngine, prompts: dict[str, Any]
) -> None:
    with counted_calls(20_000):
        answer = await http.post("/generate", json=prompts)
    assert error_of(answer, 400) == "too_many_prompts"
    assert not engine.requests


@pytest.mark.parametrize("sampling", [{"n": 11}, [{"n": 1}] * 99 + [{"n": 902}], {"n": 10**15}])
async def test_a_prompt_counts_as_often_as_it_is_sampled(
    open_http: OpenHttp, engine: FakeEngine, sampling: Any
) -> None:
    http = open_http(gateway__max_prompts=1000)
    body = {"text": ["a"] * 100, "sampling_params": sampling}
    assert error_of(await http.post("/generate", json=body), 400) == "too_many_prompts"
    assert not engine.requests
    body["sampling_params"] = {"n": 10}
    assert (await http.post("/generate", json=body)).status_code == 200
    assert len(engine.requests) == 100


async def test_a_call_with_the_most_prompts_lets_other_calls_run(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while not engine.requests:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    body = {"text": ["a"] * 4000, "sampling_params": [{"temperature": 0}] * 4000}
    answer = await http.post("/generate", json=body)
    await counting
    assert len(answer.json()) == len(engine.requests) == 4000
    assert turns > 4000 / 50


async def test_a_request_without_a_slot_is_not_started(
    open_http: OpenHttp, engine: FakeEngine
) -> None:
    """A task for each of thousands of prompts would take more memory than the prompts do."""
    http = open_http(gateway__max_in_flight=20)
    engine.outputs = lambda request: []
    before = len(asyncio.all_tasks())
    generating = asyncio.create_task(http.post("/generate", json={"text": ["a"] * 4000}))
    async with asyncio.timeout(LIMIT_S):
        await engine.until(lambda: len(engine.requests) == 10)
    assert len(asyncio.all_tasks()) < before + 50
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    assert len(engine.left) == 10


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "word " * 200_000} | SHOW_PROMPT,
        {"text": ["a", "word " * 200_000]} | SHOW_PROMPT,
        {"input_ids": [1] * 8192},
    ],
)
async def test_a_prompt_that_can_not_fit_is_refused_unread(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    prompt: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(self: Tokenizer, text: str, *, add_special: bool) -> tuple[int, ...]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "token_ids", never)
    assert error_of(await http.post("/generate", json=prompt), 400) == "prompt_too_long"
    assert not engine.requests


async def test_a_text_that_the_bus_would_refuse_is_not_sent_there(
    open_http: OpenHttp, engine: FakeEngine
) -> None:
    http = open_http(bus__max_request_bytes=1000)
    for text in ("a" * 1001, "é" * 501):
        for more in ({}, SHOW_PROMPT):
            answer = await http.post("/generate", json={"text": text} | more)
            assert error_of(answer, 413) == "request_too_large"
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [
        {"text": "\n" * 600},
        {"input_ids": [1000] * 300},
        {"text": "a", "sampling_params": {"stop": ["b" * 900, "c" * 900]}},
        {"text": "a", "sampling_params": {"logit_bias": {str(i): 1.5 for i in range(200)}}},
        {"text": ["a", "\n" * 600]},
    ],
)
async def test_a_request_that_the_bus_would_refuse_is_not_published(
    open_http: OpenHttp, engine: FakeEngine, body: dict[str, Any]
) -> None:
    """The request's size counts in its form on the bus: quoted, with all its parameters."""
    answer = await open_http(bus__max_request_bytes=1000).post("/generate", json=body)
    assert error_of(answer, 413) == "request_too_large"
    assert not engine.requests


async def test_the_gateway_accepts_every_request_that_the_bus_accepts(
    open_http: OpenHttp, engine: FakeEngine
) -> None:
    """To the byte."""
    body = {"text": "é" * 300, "rid": "mine", "sampling_params": {"stop": ["\n"]}}
    await open_http().post("/generate", json=body)
    raw = encode_request(engine.requests.pop())[1]
    for most in (len(raw), len(raw) - 1):
        fits = not isinstance(decode_request(raw, "json", most), Malformed)
        answer = await open_http(bus__max_request_bytes=most).post("/generate", json=body)
        assert (answer.status_code, len(engine.requests)) == ((200, 1) if fits else (413, 0))
        engine.requests.clear()


async def test_long_texts_are_tokenised_two_at_a_time_while_others_are_served(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.post("/generate", json={"text": "a"} | SHOW_PROMPT)  # loads the tokenizer
    running, most = 0, 0
    two, go_on, lock = threading.Event(), threading.Event(), threading.Lock()

    def held(self: Tokenizer, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                two.set()
        assert go_on.wait(LIMIT_S)
        with lock:
            running -= 1
        return (1,)

    monkeypatch.setattr(Tokenizer, "token_ids", held)
    body = {"text": "word " * 2000} | SHOW_PROMPT
    generating = [asyncio.create_task(http.post("/generate", json=body)) for _ in range(6)]
    assert await asyncio.to_thread(two.wait, LIMIT_S)
    for _ in range(20):
        assert (await http.get("/health")).status_code == 200
    go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*generating)} == {200}
    assert most == 2

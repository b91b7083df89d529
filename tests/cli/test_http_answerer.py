"""What is asked over OpenAI's interface is what would be asked over the bus; so are failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from nano_inference.bus.public import CompletionChunk, GenerateRequest, Output
from nano_inference.cli.answerer import Server
from nano_inference.cli.http_answerer import HttpAnswerer
from nano_inference.config import Config, GatewayConfig, RequestError
from nano_inference.gateway.app import make_app

from ..gateway.fake import FakeEngine, completion, refused, sample
from ..gateway.served import serve

URL = "http://127.0.0.1:8000/v1"
LIMIT_S = 20


def answerer_of(app: Any) -> HttpAnswerer:
    """One that reaches an application without a socket."""
    answerer = HttpAnswerer(Server(URL))
    answerer._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return answerer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def answerer(engine: FakeEngine) -> AsyncIterator[HttpAnswerer]:
    app = make_app(engine, Config())  # type: ignore[arg-type]
    async with answerer_of(app) as answerer:
        yield answerer


async def text_of(answerer: HttpAnswerer, request: dict[str, Any]) -> str:
    async with asyncio.timeout(LIMIT_S), aclosing(answerer.ask(request)) as pieces:
        return "".join([piece.text async for piece in pieces])


SAMPLING = {
    "temperature": 0.5,
    "max_tokens": 9,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {17: 2.5},
    "min_tokens": 2,
    "max_draft_tokens": 3,
}


async def test_each_field_comes_to_the_engine_as_over_the_bus(
    answerer: HttpAnswerer, engine: FakeEngine
) -> None:
    request = {
        "prompt": "a",
        "model": "tiny",
        "sampling": SAMPLING,
        "stream": True,
        "tenant": "lab",
        "priority": -3,
        "budget_ns": 5 * 10**9,
        "prediction": "five seven",
    }
    assert await text_of(answerer, request) == "five six"
    (asked,) = engine.requests
    wanted = msgspec.convert(request, GenerateRequest)
    assert asked.prompt == wanted.prompt
    assert asked.prediction == wanted.prediction
    assert asked.sampling == wanted.sampling
    assert (asked.tenant, asked.priority) == ("lab", -3)
    assert asked.budget_ns is not None
    assert 0 < asked.budget_ns <= 5 * 10**9


async def test_a_conversation(answerer: HttpAnswerer, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert await text_of(answerer, {"messages": messages}) == "five six"
    (asked,) = engine.requests
    assert asked.prompt_token_ids


def chunk(request: GenerateRequest, text: str) -> CompletionChunk:
    return CompletionChunk(
        request_id=request.request_id,
        entry_id="1-0",
        sample_index=0,
        token_offset=0,
        token_ids=(7,),
        logprobs=(-1.0,),
        text=text,
    )


async def test_text_comes_as_it_is_made_and_who_stops_reading_cancels(engine: FakeEngine) -> None:
    """Over a socket: without one, httpx gives an answer when it is complete."""
    engine.outputs = lambda request: [chunk(request, "Zürich 東京")]
    async with (
        serve(engine, GatewayConfig()) as served,
        HttpAnswerer(Server(f"http://127.0.0.1:{served.port}/v1")) as answerer,
    ):
        async with aclosing(answerer.ask({"prompt": "a"})) as pieces:
            assert (await anext(pieces)).text == "Zürich 東京"
        await engine.until(lambda: len(engine.left) == 1)


async def test_an_answer_is_read_to_its_end(engine: FakeEngine) -> None:
    """Behind the last event, so that no server takes us for a client that has left."""
    async with (
        serve(engine, GatewayConfig(access_log=True)) as served,
        HttpAnswerer(Server(f"http://127.0.0.1:{served.port}/v1")) as answerer,
    ):
        with capture_logs() as lines:
            assert await text_of(answerer, {"prompt": "a"}) == "five six"
            await served.server.calls.observer.idle()
    (line,) = lines
    assert (line["status"], line["completion_tokens"]) == (200, 2)
    assert "complete" not in line


async def test_a_refusal_says_why(answerer: HttpAnswerer, engine: FakeEngine) -> None:
    engine.outputs = refused("overloaded", "too many wait")
    with pytest.raises(RequestError, match="too many wait") as raised:
        await text_of(answerer, {"prompt": "a"})
    assert raised.value.code == "overloaded"


async def test_what_fails_in_mid_answer(answerer: HttpAnswerer, engine: FakeEngine) -> None:
    def fail(request: GenerateRequest) -> list[Output]:
        return [chunk(request, "one"), *refused("lane_failed", "it died")(request)]

    engine.outputs = fail
    came = []
    with pytest.raises(RequestError, match="it died") as raised:
        async with asyncio.timeout(LIMIT_S), aclosing(answerer.ask({"prompt": "a"})) as pieces:
            async for piece in pieces:
                came.append(piece.text)
    assert (came, raised.value.code) == (["one"], "lane_failed")


async def test_what_somebody_has_ended(answerer: HttpAnswerer, engine: FakeEngine) -> None:
    engine.outputs = lambda request: [
        completion(request, sample(finish_reason="abort"), status="cancelled")
    ]
    with pytest.raises(RequestError, match="ended the request"):
        await text_of(answerer, {"prompt": "a"})


async def test_models_and_cancelling(answerer: HttpAnswerer, engine: FakeEngine) -> None:
    assert await answerer.check() == "tiny"
    await answerer.cancel("mine")
    assert engine.last("cancel") == {"request_id": "mine"}


# --- servers of other kinds ---------------------------------------------------------------------


async def cut_short(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 0, "text": "one"}]}\n\n'

    return StreamingResponse(body(), media_type="text/event-stream")


async def no_json(request: Request) -> Response:
    return StreamingResponse(iter([b"data: hello\n\n"]), media_type="text/event-stream")


async def no_stream(request: Request) -> Response:
    return PlainTextResponse("hello")


async def broken(request: Request) -> Response:
    return PlainTextResponse("<html>" + "x" * 9000, 502)


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [
        (cut_short, "connection_lost", "ended before its answer did"),
        (no_json, "malformed_output", "not OpenAI's interface"),
        (no_stream, "connection_lost", "text/event-stream"),
        (broken, "502", "status 502"),
    ],
)
async def test_servers_that_do_not_keep_to_it(answer: Any, code: str, why: str) -> None:
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    async with answerer_of(app) as answerer:
        with pytest.raises(RequestError, match=why) as raised:
            await text_of(answerer, {"prompt": "a"})
    assert raised.value.code == code
    assert len(raised.value.message) < 1000

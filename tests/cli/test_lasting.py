"""Calls that outlive their connections: cut anywhere, away for a while, cancelled, without room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import httpx2
import msgspec
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.bus.public import CompletionChunk, GenerateRequest, Output
from nano_inference.cli import lasting
from nano_inference.cli.clients import ServerClient, ServerSubmitter
from nano_inference.cli.connection import ServerAddress
from nano_inference.config import BusConfig, Config, RequestError, load_config
from nano_inference.gateway.app import make_app
from nano_inference.store.store import memory_store

from ..gateway.fake import FakeEngine, chunk, completion, sample

SETTINGS = {"gateway.message_format": "off"}
WORDS = [f"<{place}>" for place in range(7)]


def words(request: GenerateRequest) -> list[Output]:
    """The outputs of a request: a chunk a word, with its last character held back."""
    if not request.stream:
        return [completion(request, sample(text="".join(WORDS)))]
    ids = tuple(range(7))
    made = sample(ids, text="".join(WORDS))
    chunks = [
        chunk(request, (place,), word, token_offset=place) for place, word in enumerate(WORDS)
    ]
    return [*chunks, completion(request, made)]


class Cut:
    """An application that cuts its next answers after so many bytes, or refuses with 503."""

    def __init__(self, app: ASGIApp, *after: int | str) -> None:
        self._app, self._after = app, list(after)
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(f"{scope['method']} {scope['path'].partition('/v1/')[2].split('/')[0]}")
        left: int | str = self._after.pop(0) if self._after else 1 << 30
        if isinstance(left, str):
            start: Message = {"type": "http.response.start", "status": 503, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": left.encode()})
            return

        whole = False

        async def limited(message: Message) -> None:
            nonlocal left
            nonlocal whole
            assert isinstance(left, int)
            if message["type"] == "http.response.start":
                whole = (b"content-type", b"application/json") in message["headers"]
            elif len(body := message.get("body", b"")) > left and whole:
                whole, left = False, -1
            elif left >= 0:
                message = {**message, "body": body[:left]}
                left -= min(left, len(body))
            await send(message)

        await self._app(scope, receive, limited)
        if left == -1:
            raise httpx2.RemoteProtocolError("an answer of a known length was cut")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(lasting, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(lasting, "_MOST_WAIT_S", 0.0)
    return FakeEngine(words)


def gateway(engine: FakeEngine) -> ASGIApp:
    config: Config = load_config(env={}, overrides=SETTINGS)
    return make_app(engine, config)  # type: ignore[arg-type]


def client_of(app: ASGIApp) -> ServerClient:
    client = ServerClient(ServerAddress("http://127.0.0.1:8000/v1"))
    client._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return client


async def asked(client: ServerClient) -> AsyncIterator[str]:
    async with aclosing(client.ask({"prompt": "a"})) as parts:
        async for part in parts:
            yield part.text


async def submitted(client: ServerClient, *, stream: bool = True) -> AsyncIterator[str]:
    request = {"prompt": "a", "stream": stream}
    async with aclosing(ServerSubmitter(client).submit(request)) as outputs:
        async for output in outputs:
            if isinstance(output, CompletionChunk):
                yield output.text
            else:
                if output.error is not None:
                    raise RequestError(output.error.message, code=output.error.code)
                assert output.samples[0].text == "".join(WORDS)


async def in_one_piece(client: ServerClient) -> AsyncIterator[str]:
    async for text in submitted(client, stream=False):
        yield text
    yield "".join(WORDS)


EACH = pytest.mark.parametrize("call", [asked, submitted, in_one_piece])
Call = Callable[[ServerClient], AsyncIterator[str]]


@EACH
@pytest.mark.parametrize("after", [(0,), (50,), (700, "away", 300), (900, "", "x", 0, 2000)])
async def test_an_answer_that_is_cut_anywhere_comes_once_and_whole(
    engine: FakeEngine, call: Call, after: tuple[int | str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    async with client_of(Cut(gateway(engine), *after)) as client:
        assert "".join([text async for text in call(client)]) == "".join(WORDS)
    assert len(engine.requests) == 1
    assert capfd.readouterr().err.count("the answer goes on when") <= 1


async def test_leaving_cancels_at_the_server_before_anything_came(engine: FakeEngine) -> None:
    engine.outputs = lambda request: []
    app = Cut(gateway(engine))
    async with client_of(app) as client:
        answer = asyncio.ensure_future(anext(asked(client)))
        await engine.until(lambda: len(engine.requests) == 1)
        answer.cancel()
        await asyncio.wait([answer])
    assert app.asked == ["POST completions", "DELETE streams"]
    assert engine.last("cancel")["request_id"] == engine.requests[0].request_id


@EACH
async def test_a_server_without_room_for_stored_calls_answers_all_the_same(
    engine: FakeEngine, call: Call
) -> None:
    engine.bus.store = memory_store(BusConfig(calls_max_bytes=1))
    app = Cut(gateway(engine))
    async with client_of(app) as client:
        assert "".join([text async for text in call(client)]) == "".join(WORDS)
    assert len(app.asked) == 2


@pytest.mark.parametrize("call", [asked, submitted])
async def test_a_server_that_has_lost_the_call_is_named(engine: FakeEngine, call: Call) -> None:
    """It was restarted without Redis: nothing is said twice, and the rest is not made up."""
    lost, came = gateway(engine), []
    other = FakeEngine(lambda request: [_entered(each) for each in words(request)])
    app = Cut(lost, 900)

    async def first_one_then_the_other(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if not app.asked else gateway(other))(scope, receive, send)

    async with client_of(first_one_then_the_other) as client:
        with pytest.raises(RequestError, match="started again") as raised:
            async for text in call(client):
                came.append(text)
    assert raised.value.code == "stream_not_found"
    assert 0 < len(came) < len(WORDS)
    assert came == WORDS[: len(came)]


def _entered(output: Output) -> Output:
    return msgspec.structs.replace(output, entry_id="9-0")


async def test_a_server_that_stays_away_ends_the_call(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "AWAY_S", 0.0)
    async with client_of(Cut(gateway(engine), 900, *["away"] * 9)) as client:
        with pytest.raises(RequestError, match="503"):
            async for _ in asked(client):
                pass

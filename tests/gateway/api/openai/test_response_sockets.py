"""`/v1/responses` as a WebSocket: turns, cancellation, errors, and resumption after a cut."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nano_inference.config import Config, load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.server.server import HttpServer

from ....certificates import Authority
from ...fake import FakeEngine
from ...saying import Model
from ...served import listening

ENDS = ("error", "response.completed", "response.incomplete", "response.failed")
USER = {"role": "user", "content": "a"}
STORED: dict[str, Any] = {"type": "response.create", "model": "tiny", "input": "a"}
UNSTORED = STORED | {"store": False}


class Place:
    """A gateway, and connections to it."""

    def __init__(self, server: HttpServer, port: int, scheme: str = "ws") -> None:
        self.server = server
        self.url = f"{scheme}://localhost:{port}/v1/responses"

    def open(self, **given: Any) -> AbstractAsyncContextManager[ClientConnection]:
        return connect(self.url, proxy=None, close_timeout=0.1, **given)


@asynccontextmanager
async def gateway(engine: FakeEngine, config: Config, scheme: str = "ws") -> AsyncIterator[Place]:
    app = make_app(engine, config)  # type: ignore[arg-type]
    server = HttpServer(app, config.gateway)
    async with listening(server) as port:
        yield Place(server, port, scheme)
    await app.aclose()


@pytest.fixture(scope="module")
def calling() -> Config:
    """Settings with the bundled model, whose template needs no process of its own."""
    settings = {"gateway.message_format": "off", "gateway.max_body_bytes": 1 << 20}
    return load_config(env={}, overrides=settings)


@pytest.fixture
async def place(model: Model, calling: Config) -> AsyncIterator[Place]:
    async with gateway(model.engine, calling) as found:
        yield found


async def send(socket: ClientConnection, message: dict[str, Any]) -> None:
    await socket.send(json.dumps(message))


async def until(socket: ClientConnection, *kinds: str) -> list[dict[str, Any]]:
    """The events up to the first one of these kinds."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in kinds:
        found.append(json.loads(await socket.recv()))
    return found


async def turn(socket: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
    """The last event after a message."""
    await send(socket, message)
    return (await until(socket, *ENDS))[-1]


def error_in(event: dict[str, Any]) -> tuple[int, str, str | None]:
    assert event["type"] == "error", event
    return event["status"], event["error"]["code"], event["error"]["param"]


# --- turns ------------------------------------------------------------------------------------


async def test_openai_s_library_makes_several_turns_on_one_connection(
    place: Place, model: Model
) -> None:
    base = place.url.removesuffix("/responses")
    async with (
        AsyncOpenAI(base_url="http://unused", websocket_base_url=base, api_key="none") as client,
        client.responses.connect() as connection,
    ):
        model.says("one")
        await connection.response.create(model="tiny", input="a")
        kinds: list[str] = []
        async for event in connection:
            kinds.append(event.type)
            if event.type == "response.completed":
                break
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert event.response.output_text == "one"
        model.says("two")
        await connection.response.create(
            model="tiny", input="b", previous_response_id=event.response.id
        )
        async for event in connection:
            if event.type == "response.completed":
                break
        assert event.response.output_text == "two"
    assert model.prompt().count("<|im_start|>") == 4


async def test_a_connection_continues_what_is_not_stored(place: Place, model: Model) -> None:
    model.says("one")
    async with place.open() as socket:
        first = await turn(socket, UNSTORED)
        previous = {"previous_response_id": first["response"]["id"]}
        assert (await turn(socket, UNSTORED | previous))["response"]["status"] == "completed"
        assert "assistant\none<|im_end|>" in model.prompt()
        # Only the last one, and only here.
        assert error_in(await turn(socket, UNSTORED | previous))[1] == "previous_response_not_found"
        warm = await turn(socket, UNSTORED | {"generate": False, "input": [USER, USER]})
        assert (warm["type"], warm["response"]["output"]) == ("response.completed", [])
        number = len(model.requests)
        await turn(socket, UNSTORED | {"previous_response_id": warm["response"]["id"]})
        assert model.prompt().count("user\na<|im_end|>") == 3
    assert len(model.requests) == number + 1
    async with place.open() as socket:
        assert error_in(await turn(socket, UNSTORED | previous))[1] == "previous_response_not_found"


async def test_errors_are_events_and_the_connection_stays(place: Place, model: Model) -> None:
    model.says("one")
    async with place.open() as socket:
        for message, wanted in (
            (STORED | {"model": "other"}, (404, "model_not_found", "model")),
            (STORED | {"nonsense": 1}, (400, "unsupported", "nonsense")),
            (STORED | {"background": True}, (400, "invalid_request", "background")),
            (STORED | {"input": [], "generate": False}, (400, "invalid_request", "input")),
            ({"type": "response.steer"}, (400, "unsupported", "type")),
            ({"type": "response.cancel"}, (400, "invalid_request", "response_id")),
            ({"type": "response.resume", "response_id": "x"}, (404, "unknown_response", None)),
            ({"type": "response.resume"}, (400, "invalid_request", None)),
        ):
            assert error_in(await turn(socket, message)) == wanted, message
        for text in ("{", b"{}"):
            await socket.send(text)
            assert error_in((await until(socket, "error"))[-1])[1] == "malformed"
        assert (await turn(socket, STORED))["response"]["status"] == "completed"
        # Larger than any body.
        large = "a" * (place.server.connections.config.max_body_bytes + 1)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.send(large)
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_one_response_at_a_time_is_in_flight_and_can_be_cancelled(
    place: Place, model: Model
) -> None:
    model.says("one two three")
    for body in (STORED, UNSTORED):
        model.engine.hold()
        async with place.open() as socket:
            await send(socket, body)
            begun = await until(socket, "response.in_progress")
            assert error_in(await turn(socket, body)) == (409, "response_in_flight", None)
            other = {"type": "response.cancel", "response_id": "resp_0"}
            assert error_in(await turn(socket, other))[1] == "invalid_request"
            named = {"response_id": begun[0]["response"]["id"]}
            last = await turn(socket, {"type": "response.cancel"} | named)
            assert last["type"] == "response.incomplete"
            assert last["response"]["status"] == "cancelled"
            model.engine.go()
            assert (await turn(socket, body))["response"]["status"] == "completed"


# --- the end of a connection --------------------------------------------------------------------


async def test_a_cut_stream_is_resumed_at_another_gateway_after_its_last_event(
    place: Place, model: Model, calling: Config
) -> None:
    model.says("one two three four")
    model.engine.hold()
    async with AsyncExitStack() as stack:
        socket = await stack.enter_async_context(place.open())
        await send(socket, STORED)
        events = await until(socket, "response.output_text.delta")
        socket.transport.abort()
        other = await stack.enter_async_context(gateway(model.engine, calling))
        back = await stack.enter_async_context(other.open())
        last = {"starting_after": events[-1]["sequence_number"]}
        named = {"response_id": events[0]["response"]["id"]}
        await send(back, {"type": "response.resume"} | named | last)
        model.engine.go()
        events += await until(back, *ENDS)
        numbers = [each["sequence_number"] for each in events]
        assert numbers == list(range(len(numbers)))
        response = events[-1]["response"]
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"] == "one two three four"
        # From the beginning as well.
        await send(back, {"type": "response.resume"} | named)
        assert await until(back, *ENDS) == events
    # It was computed once, and not cancelled.
    assert len(model.requests) == 1
    assert "cancel" not in model.engine.names


async def test_a_client_that_leaves_cancels_its_response(place: Place, model: Model) -> None:
    model.says("one two three")
    model.engine.hold()
    for body in (STORED, UNSTORED):
        async with place.open() as socket:
            await send(socket, body)
            await until(socket, "response.in_progress")
        request_id = model.requests[-1].request_id
        await model.engine.until(
            lambda request_id=request_id: request_id in (*model.engine.left, *model.engine.ended)
        )
        assert model.engine.last("cancel")["request_id"] == request_id


async def test_an_idle_connection_makes_room_and_a_working_one_stays(
    place: Place, model: Model
) -> None:
    model.says("one two")
    connections = place.server.connections
    async with place.open() as idle, place.open() as working:
        model.engine.hold()
        await send(working, STORED)
        await until(working, "response.in_progress")
        connections._most = len(connections)
        async with place.open() as newcomer:
            with pytest.raises(ConnectionClosed):
                await idle.recv()
            model.engine.go()
            assert (await until(working, *ENDS))[-1]["type"] == "response.completed"
            assert (await turn(newcomer, STORED))["type"] == "response.completed"


async def test_a_client_that_does_not_read_is_disconnected(place: Place, model: Model) -> None:
    model.says("one " * 2000)
    connections = place.server.connections
    async with place.open(max_queue=1) as socket:
        socket.transport.pause_reading()
        await send(socket, STORED)
        await model.engine.until(lambda: len(model.requests) == 1)
        (watched,) = connections._all
        watched.transport.get_write_buffer_size = lambda: 1  # type: ignore[attr-defined]
        for _ in range(int(connections.config.send_timeout_s) + 2):
            connections.sweep(1.0)
        with anyio.fail_after(10):
            while len(connections):  # noqa: ASYNC110
                await anyio.sleep(0.001)


async def test_a_gateway_that_stops_closes_with_its_code(model: Model, calling: Config) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(gateway(model.engine, calling))
        socket = await stack.enter_async_context(found.open())
        found.server.should_exit = True
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


# --- who may connect ----------------------------------------------------------------------------


async def refused(found: Place, **given: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as error:
        async with found.open(**given):
            pass
    response = error.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


async def test_pages_of_other_origins_are_refused(place: Place) -> None:
    page = {"origin": "https://evil.example"}
    assert await refused(place, **page) == (403, "forbidden_origin")
    place.url, rebound = place.url.replace("localhost", "evil.example"), {"host": "127.0.0.1"}
    assert await refused(place, **rebound) == (403, "forbidden_host")


async def test_other_paths_have_no_socket(place: Place) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/models", 426)):
        with pytest.raises(InvalidStatus) as error:
            async with connect(place.url.replace("/v1/responses", path), proxy=None):
                pass
        assert error.value.response.status_code == status


async def test_keys_are_checked_at_the_handshake_and_for_each_response(
    model: Model, calling: Config, tmp_path: Path
) -> None:
    """Over TLS."""
    authority = Authority(tmp_path / "authority")
    own = authority.issue("gateway")
    files = {"tls_certificate": str(own.certificate), "tls_key": str(own.key)}
    config = replace(
        calling,
        gateway=replace(calling.gateway, **files),
        policy=replace(calling.policy, backend="bus", refresh_s=0.01),
    )
    context = ssl.create_default_context(cafile=authority.file)
    model.says("one")
    async with gateway(model.engine, config, "wss") as found:
        app: Any = found.server.limits.app
        administration = Administration(app.policy.store)
        key = await administration.create_key({"name": "a", "scopes": ["generate"]})
        reader = await administration.create_key({"name": "b", "scopes": ["read"]})
        assert await refused(found, ssl=context) == (401, "missing_api_key")
        of_reader = {"Authorization": f"Bearer {reader['key']}"}
        forbidden = await refused(found, ssl=context, additional_headers=of_reader)
        assert forbidden == (403, "insufficient_scope")
        headers = {"Authorization": f"Bearer {key['key']}"}
        async with found.open(ssl=context, additional_headers=headers) as socket:
            assert (await turn(socket, STORED))["type"] == "response.completed"
            await administration.revoke_key(key["id"])
            assert error_in(await turn(socket, STORED))[:2] == (401, "invalid_api_key")

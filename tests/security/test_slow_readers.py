"""Fifty clients that never read hold only so much each, and delay nobody who does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, GatewayConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.connections import SEND_BUFFER_BYTES, Connection
from nano_inference.gateway.server.server import HttpServer
from nano_inference.gateway.serving.samples import MOST_UNSENT

from ..gateway.fake import FakeEngine, chunk, completion, sample
from ..gateway.served import listening
from .mutations.wire import post, read_answer

LIMIT_S = 60
STUCK = 20
TOKENS = 64
"""Of one chunk."""

CHUNKS = 6 * MOST_UNSENT // TOKENS
TEXT = "x" * 4096
"""Of one chunk."""

MOST_CHUNKS = MOST_UNSENT // TOKENS + 2
"""That wait for a client, with the one that fills the room and the one that does not fit."""

KERNEL_BYTES = 1 << 16
"""What it receives for a client; it takes twice that."""

HIGH_WATER = 1 << 16
"""uvicorn's: beyond it a connection is sent no more."""

MESSAGES = [{"role": "user", "content": "a"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v2/models/tiny/generate_stream": {"text_input": "a"},
    "/generate": {"text": "a"},
}
WITH_KEY = "/v1/completions"
ALL_TAKEN = ("/generate",)
"""The newest state of a sample is kept."""


class LongAnswers(FakeEngine):
    """Says the same to everybody, for long.

    Attributes:
        taken: By request, the chunks that were taken of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: Counter[str] = Counter()

    async def _made(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        done = False
        try:
            for place in range(CHUNKS):
                self.taken[request.request_id] += 1
                end = "length" if place + 1 == CHUNKS else None
                yield chunk(
                    *(request, (7,) * TOKENS, TEXT), token_offset=place * TOKENS, finish_reason=end
                )
            done = True
            number = CHUNKS * TOKENS
            told = sample((7,) * number, text=TEXT * CHUNKS, logprobs=(-1.0,) * number)
            yield completion(request, told)
        finally:
            (self.ended if done else self.left).append(request.request_id)
            self._change()


def call(path: str, tenant: str, *headers: tuple[bytes, bytes]) -> bytes:
    body = json.dumps(CALLS[path] | {"stream": True}).encode()
    return post(path, body, [(b"X-Tenant", tenant.encode()), *headers])


def text_of(body: bytes) -> str:
    """All that a stream tells, of any interface."""
    texts: list[str] = []
    for line in body.decode().split("\n"):
        name, _, data = line.partition(": ")
        if name != "data" or data == "[DONE]":
            continue
        event = json.loads(data)
        if "meta_info" in event:
            # These repeat what came before.
            texts = [event["text"]]
        texts.append(event.get("text_output", ""))
        delta = event.get("delta", "")
        texts += [choice.get("text", "") for choice in event.get("choices", ())]
        texts += [choice.get("delta", {}).get("content", "") for choice in event.get("choices", ())]
        texts.append(delta if isinstance(delta, str) else delta.get("text", ""))
    return "".join(texts)


async def stick(port: int, raw: bytes) -> socket.socket:
    """A client that sends a call and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, raw)
    return client


async def read_all(port: int, raw: bytes) -> str:
    """What a client gets that reads as fast as it can."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(raw)
        answer = await read_answer(reader)
        assert answer.status == 200
        return text_of(answer.body)
    finally:
        writer.transport.abort()


async def until(holds: Callable[[], bool]) -> None:
    """Lets the server do what it has to; the test's time limit ends it."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[tuple[HttpServer, int]]:
    # The engine makes up a text, of which its tokens know nothing.
    config = GatewayConfig(send_timeout_s=600, keep_alive_s=3600, message_format="off")
    app = make_app(engine, Config(gateway=config))  # type: ignore[arg-type]
    server = HttpServer(app, config)
    async with listening(server) as port:
        yield server, port
    await app.durable_calls()[0].aclose()


def path_of(connection: Connection) -> str:
    return str(connection.scope["path"])


@pytest.mark.slow
async def test_many_that_never_read() -> None:
    engine, whole = LongAnswers(), TEXT * CHUNKS
    paths = [list(CALLS)[index % len(CALLS)] for index in range(STUCK)]
    keys = {index: b"key-%d" % index for index in range(STUCK) if paths[index] == WITH_KEY}
    calls = [
        call(path, f"t{index}", *([(b"Idempotency-Key", keys[index])] if index in keys else []))
        for index, path in enumerate(paths)
    ]
    async with asyncio.timeout(LIMIT_S), served(engine) as (server, port):
        stuck = [await stick(port, raw) for raw in calls]
        connections = server.connections._all

        def rests() -> bool:
            """Whether everybody has been given all that he will be."""
            full = sum(taken in at_rest for taken in engine.taken.values())
            paused = all(each.flow is not None and each.flow.write_paused for each in connections)
            return len(connections) == STUCK and paused and full == STUCK

        at_rest = set(range(MOST_CHUNKS - 1, CHUNKS + 1))
        await until(rests)
        own = set(engine.taken)
        for path in CALLS:
            assert await read_all(port, call(path, "reader")) == whole
        # Nothing more was made for those who do not read, beyond what they hold already.
        held = {each: each.transport.get_write_buffer_size() for each in connections}
        held = {each: size for each, size in held.items() if each.flow.write_paused}
        assert len(held) == STUCK
        for connection, size in held.items():
            chunks = CHUNKS if path_of(connection) in ALL_TAKEN else MOST_CHUNKS
            assert size <= HIGH_WATER + 2 * chunks * len(TEXT), path_of(connection)
        taken = [number for request_id in own if (number := engine.taken[request_id]) != CHUNKS]
        assert len(taken) == STUCK - sum(paths.count(path) for path in ALL_TAKEN)
        # What is being sent, what waits, and what the kernel has.
        in_buffers = (HIGH_WATER + 2 * (SEND_BUFFER_BYTES + KERNEL_BYTES)) // len(TEXT)
        assert max(taken) <= 2 * MOST_CHUNKS + in_buffers < CHUNKS
        # Those who have taken nothing for so long are ended.
        for _ in range(602):
            server.connections.sweep(1.0)
        await until(lambda: not any(each in connections for each in held))
        await engine.until(lambda: len(engine.left) == len(taken))
        # All but those who have shown that they may come back, who find all of it.
        for index, key in keys.items():
            again = call(paths[index], f"t{index}", (b"Idempotency-Key", key))
            assert await read_all(port, again) == whole
        cancelled = {given["request_id"] for name, given in engine.calls if name == "cancel"}
        kept = [each.request_id for each in engine.requests if each.tenant[1:].isdecimal()]
        unkeyed = [each for each in kept if each.startswith(("chatcmpl-", "resp_"))]
        assert cancelled == set(unkeyed)
        for client in stuck:
            client.close()

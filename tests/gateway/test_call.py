"""A call that came over no connection: a program's own, such as a line of a file of calls."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from nano_inference.gateway.api.openai.generate import GenerationCalls
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.call import Call, ClientLeft
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.keys import Unauthenticated
from nano_inference.gateway.server.http import EventStream

from .fake import LIMIT_S, FakeEngine, app_of
from .made import TEXTS, interleaved

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(interleaved)


@pytest.fixture
def app(engine: FakeEngine) -> GatewayApp:
    return app_of(engine, {"policy.backend": "bus"})


async def key_of(app: GatewayApp) -> str:
    assert app.policy.store is not None
    made = await Administration(app.policy.store).create_key({"name": "files", "tenant": "night"})
    key: str = made["key"]
    return key


def call_of(key: str, **fields: Any) -> Call:
    body = json.dumps(CHAT | fields).encode()
    return Call(body=body, headers=[(b"authorization", f"Bearer {key}".encode())])


async def answered(app: GatewayApp, call: Call) -> Any:
    (model,) = app.services()
    await model.chain.enter(call, "generate")
    return await GenerationCalls(model).chat(call)


async def test_a_chat_passes_the_chain_and_is_answered(app: GatewayApp, engine: FakeEngine) -> None:
    call = call_of(await key_of(app))
    answer = json.loads((await answered(app, call)).body)
    assert answer["choices"][0]["message"]["content"] == "".join(TEXTS)
    assert (call.caller.name, call.tenant) == ("files", "night")
    assert engine.requests[0].tenant == "night"
    assert call.account.completion_tokens == answer["usage"]["completion_tokens"] == 3


async def test_a_chat_without_a_key_is_refused(app: GatewayApp, engine: FakeEngine) -> None:
    with pytest.raises(Unauthenticated):
        await answered(app, call_of("ni-none"))
    assert not engine.requests


async def test_the_events_of_a_stream_go_to_any_function(app: GatewayApp) -> None:
    stream = await answered(app, call_of(await key_of(app), stream=True))
    assert isinstance(stream, EventStream)
    events: list[bytes] = []

    async def send(data: bytes, event_id: str = "", *, name: str = "") -> None:
        events.append(data)

    await stream.produce(send)
    assert events.pop() == b"[DONE]"
    deltas = [json.loads(each)["choices"][0]["delta"] for each in events]
    assert "".join(each.get("content", "") for each in deltas) == "".join(TEXTS)


async def test_a_call_whose_caller_leaves_ends_its_request(
    app: GatewayApp, engine: FakeEngine
) -> None:
    call, left = call_of(await key_of(app)), anyio.Event()
    call.cancelled = left.wait

    async def leave() -> None:
        await engine.until(lambda: bool(engine.requests))
        left.set()

    engine.outputs = lambda request: []  # it hangs
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(leave)
            with pytest.raises(ClientLeft):
                await answered(app, call)
    assert engine.left == [engine.requests[0].request_id]

"""Durable calls whose connection closes, or whose gateway is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import pytest

from nano_inference.bus.public import GenerateRequest
from nano_inference.config import load_config
from nano_inference.gateway.server.http import EngineError
from nano_inference.gateway.serving.durable_calls import (
    Attachment,
    CallHead,
    DurableCalls,
    DurableRecord,
    IdempotencyKey,
    watch_orphans,
)
from nano_inference.telemetry import TraceContext

from ..fake import FakeEngine
from ..made import cut, interleaved

SOON_S = 0.2
LATER_S = 3600.0


class Call(DurableRecord, frozen=True, kw_only=True):
    """A call of one request."""

    call: CallHead

    request_ids = property(lambda self: [self.id])
    is_durable = True

    def encode(self) -> bytes:
        return b""


def call(call_id: str, name: str = "") -> Call:
    keyed = IdempotencyKey(name, "") if name else None
    head = CallHead(id=call_id, created=0, model="")
    return Call(tenant="", call=head, keyed=keyed)


class Gateway(DurableCalls):
    """The durable calls of a gateway, with its settings."""

    def __init__(self, engine: FakeEngine, grace_s: float) -> None:
        config = load_config(env={}, overrides={"gateway.resume_grace_s": grace_s})
        super().__init__(engine, config)  # type: ignore[arg-type]
        store = engine.bus.store.calls
        self.watch = partial(watch_orphans, store, config, lambda: [self], lambda call: self)


@asynccontextmanager
async def serving(kept: Gateway) -> AsyncIterator[DurableCalls]:
    """Run the background task."""
    running = asyncio.create_task(kept.watch())
    try:
        yield kept
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def read(
    attached: AbstractAsyncContextManager[Attachment], call_id: str, begun: asyncio.Event
) -> None:
    """A connection that reads a call's only request."""
    async with attached as attachment:
        outputs = attachment.outputs(GenerateRequest(request_id=call_id), TraceContext())
        async for _ in outputs:
            begun.set()


async def connected(
    attached: AbstractAsyncContextManager[Attachment], call_id: str
) -> asyncio.Task[None]:
    """A connection that has its first token."""
    begun = asyncio.Event()
    connection = asyncio.create_task(read(attached, call_id, begun))
    await begun.wait()
    return connection


async def connect(kept: DurableCalls, call_id: str, name: str = "") -> asyncio.Task[None]:
    return await connected(kept.begun(call(call_id, name)), call_id)


async def come_back(kept: DurableCalls, call_id: str) -> asyncio.Task[None]:
    found = await kept.find(call_id)
    return await connected(kept.resumed(call(call_id), found), call_id)


async def close(connection: asyncio.Task[None]) -> None:
    connection.cancel()
    await asyncio.wait([connection])


def cancelled(engine: FakeEngine) -> list[str]:
    return [given["request_id"] for name, given in engine.calls if name == "cancel"]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(cut)


async def test_a_call_ends_with_its_connection(engine: FakeEngine) -> None:
    kept = Gateway(engine, LATER_S)
    await close(await connect(kept, "c"))
    assert cancelled(engine) == ["c"]


async def test_a_resumable_call_goes_on_for_its_grace(engine: FakeEngine) -> None:
    kept = Gateway(engine, LATER_S)
    await kept.claim(call("c", "name"))
    await close(await connect(kept, "c", name="name"))
    assert cancelled(engine) == []
    # It ends after the grace.
    async with serving(Gateway(engine, SOON_S)) as soon:
        await soon.claim(call("d", "other"))
        await close(await connect(soon, "d", name="other"))
        await engine.until(lambda: cancelled(engine) == ["d"])


async def test_an_attached_call_goes_on(engine: FakeEngine) -> None:
    async with serving(Gateway(engine, SOON_S)) as kept:
        attended = await connect(kept, "attended")
        # Many times as long as it would take.
        for number in range(3):
            name = f"left-{number}"
            await kept.claim(call(name, name))
            await close(await connect(kept, name, name=name))
            await engine.until(lambda name=name: name in cancelled(engine))  # type: ignore[misc]
        assert "attended" not in cancelled(engine)
        await close(attended)
    assert "attended" in cancelled(engine)


async def test_calls_of_a_killed_gateway_are_ended_by_another(engine: FakeEngine) -> None:
    """Also without an idempotency key, since the disconnect was not seen."""
    killed = Gateway(engine, SOON_S)
    connection = await connect(killed, "c")
    async with serving(Gateway(engine, SOON_S)):
        await engine.until(lambda: cancelled(engine) == ["c"])
    await close(connection)


async def test_an_orphan_whose_key_another_call_has_is_dropped(engine: FakeEngine) -> None:
    """Its gateway was killed before it claimed the key, and the client came again."""
    gateway, store = Gateway(engine, LATER_S), engine.bus.store.calls
    taken: list[str] = []
    gateway.taken_over_by(lambda call_id, stored: taken.append(call_id) is None)
    await store.claim("used", "another")
    for call_id, name in (("first", "used"), ("second", "free")):
        await store.keep(call_id, msgspec.json.encode(call(call_id, name)), LATER_S)
        stored = await store.read(call_id)
        assert stored is not None
        await gateway.end_orphaned(call_id, stored)
    assert taken == ["second"]
    assert await store.read("first") is None
    assert await store.claim("free", "third") == "second"


async def test_calls_of_a_stopped_gateway_go_on(engine: FakeEngine) -> None:
    kept = Gateway(engine, SOON_S)
    connection = await connect(kept, "c")
    kept.stopping = True
    await close(connection)
    assert cancelled(engine) == []
    async with serving(Gateway(engine, SOON_S)):
        await engine.until(lambda: cancelled(engine) == ["c"])


async def test_a_call_refused_by_a_draining_gateway_can_be_resent(engine: FakeEngine) -> None:
    """A call that hasn't begun is deleted, so that its key can be used again at once."""
    kept = Gateway(engine, LATER_S)
    no = EngineError("no", code="shutting_down")
    await close(await connect(kept, "c"))
    found = await kept.find("c")
    engine.calls.clear()
    async with kept.resumed(call("c"), found) as attachment:
        attachment.fail(no)
    assert cancelled(engine) == []
    await kept.claim(call("d", "name"))
    async with kept.begun(call("d", "name")) as attachment:
        attachment.fail(no)
    assert await kept.find("d") is None
    assert await kept.claim(call("e", "name")) == "e"


async def test_a_call_resumed_elsewhere_goes_on(engine: FakeEngine) -> None:
    """A connection that is dead is seen to be closed after its client has come back."""
    first, second = Gateway(engine, LATER_S), Gateway(engine, LATER_S)
    connection = await connect(first, "c")
    again = await come_back(second, "c")
    await close(connection)
    assert cancelled(engine) == []
    await close(again)
    assert cancelled(engine) == []
    assert len(engine.requests) == 1


async def test_a_call_ends_with_its_last_connection(engine: FakeEngine) -> None:
    """Two at one gateway, without any grace."""
    kept = Gateway(engine, 0)
    connection = await connect(kept, "c")
    again = await come_back(kept, "c")
    await close(connection)
    assert cancelled(engine) == []
    await close(again)
    assert cancelled(engine) == ["c"]


async def test_an_ended_call_is_not_cancelled(engine: FakeEngine) -> None:
    engine.outputs = interleaved
    kept = Gateway(engine, SOON_S)
    await (await connect(kept, "c"))
    async with serving(kept):
        engine.outputs = cut
        await kept.claim(call("d", "other"))
        await close(await connect(kept, "d", name="other"))
        await engine.until(lambda: "d" in cancelled(engine))
    assert cancelled(engine) == ["d"]


async def test_a_disconnect_during_publishing_cancels_the_request(engine: FakeEngine) -> None:
    publishing, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def publish(self, *given: Any, **named: Any) -> str:
            publishing.set()
            await go.wait()
            return await super().publish(*given, **named)

    engine.__class__ = Slow
    kept = Gateway(engine, LATER_S)
    connection = asyncio.create_task(read(kept.begun(call("c")), "c", asyncio.Event()))
    await publishing.wait()
    connection.cancel()
    await asyncio.sleep(0)
    assert cancelled(engine) == []
    go.set()
    await asyncio.wait([connection])
    assert cancelled(engine) == ["c"]


async def test_a_cancelled_call_publishes_no_more(engine: FakeEngine) -> None:
    """At this gateway at once, and at the others with the next look at the store."""
    kept = Gateway(engine, LATER_S)
    async with kept.begun(call("c")) as attachment:
        assert attachment is not None
        assert attachment.begins("c")
        await kept.cancel("c")
        assert not attachment.begins("c")
        attachment.end()


async def test_a_call_cancelled_elsewhere_during_publishing_is_cancelled(
    engine: FakeEngine,
) -> None:
    """The other gateway does not know of the request yet."""
    other = Gateway(engine, LATER_S)

    class Slow(FakeEngine):
        async def publish(self, *given: Any, **named: Any) -> str:
            await other.cancel("c")
            assert cancelled(engine) == []
            return await super().publish(*given, **named)

    engine.__class__ = Slow
    connection = await connect(Gateway(engine, LATER_S), "c")
    assert cancelled(engine) == ["c"]
    await close(connection)

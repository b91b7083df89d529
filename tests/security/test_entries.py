"""Entries of the requests stream that nobody meant to be read: none of them ends admission."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
import pytest_asyncio

from nano_inference import BusClient, Config, GenerateRequest, Pipeline, load_config
from nano_inference.bus import Bus, Malformed, MemoryBus, open_bus
from nano_inference.bus.entries import MAX_TRACEPARENT_BYTES, MAX_TRACESTATE_BYTES
from nano_inference.bus.redis import links as redis_links
from nano_inference.config import MOST_TEXT, BusConfig, BusError, ChannelClosed
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.admission.refusals import is_of_the_entry

from .conftest import Write

LIMIT_S = 60
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GOOD = {"prompt": "1 + 1 =", "sampling": {"temperature": 0, "max_tokens": 2}}
LARGE = {"prompt_token_ids": [500] * 2000, "sampling": {"temperature": 0, "max_tokens": 2}}


@pytest_asyncio.fixture(params=["memory", "redis"])
async def bus(request: pytest.FixtureRequest, redis_bus: Bus) -> Bus:
    return MemoryBus(BusConfig()) if request.param == "memory" else redis_bus


async def take_one(bus: Bus) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return (await bus.requests.take(1))[0]


LONGEST = "k=" + "v" * (MAX_TRACESTATE_BYTES - 2)


@pytest.mark.parametrize(
    ("parent", "state", "kept"),
    [
        (TRACEPARENT, "k=" + "v" * 70_000_000, (TRACEPARENT, "")),
        (TRACEPARENT, LONGEST, (TRACEPARENT, LONGEST)),
        ("0" * (MAX_TRACEPARENT_BYTES + 1), "k=v", ("", "")),
    ],
    ids=["a state that is too long", "a state of the longest size", "a parent that is too long"],
)
async def test_a_trace_that_is_too_long_is_dropped_and_the_request_runs(
    bus: Bus, parent: str, state: str, kept: tuple[str, str]
) -> None:
    await bus.requests.publish(GOOD, traceparent=parent, tracestate=state)
    entry = await take_one(bus)
    assert isinstance(entry.request, GenerateRequest)
    assert (entry.traceparent, entry.tracestate) == kept


async def test_entries_of_other_programs_have_the_same_limits(
    redis_bus: Bus, write_entry: Write
) -> None:
    state = b"k=" + b"v" * 20_000_000
    trace = {"traceparent": TRACEPARENT.encode(), "tracestate": state}
    await write_entry({"json": b'{"prompt": "x"}'} | trace)
    entry = await take_one(redis_bus)
    assert isinstance(entry.request, GenerateRequest)
    assert (entry.traceparent, entry.tracestate) == (TRACEPARENT, "")


async def test_an_entry_of_many_fields_is_refused_in_few_words(
    redis_bus: Bus, write_entry: Write
) -> None:
    fields = {f"{number}-" + "f" * 1000: b"" for number in range(10_000)}
    await write_entry({"json": b"{}", **fields})
    entry = await take_one(redis_bus)
    assert isinstance(entry.request, Malformed)
    assert entry.request.code == "malformed"
    assert entry.request.message.endswith("and many more")
    assert len(entry.request.message) < MOST_TEXT


# --- what can't be handled, or handed on ----------------------------------------------------------


def test_an_entry_is_poison_where_neither_the_bus_nor_the_lane_is_the_reason() -> None:
    assert is_of_the_entry(BusError("a message of many bytes", code="message_too_large"))
    assert is_of_the_entry(RecursionError())
    assert not is_of_the_entry(ChannelClosed("the bus was closed"))
    assert not is_of_the_entry(BusError("Redis can't be reached"))


def config_on(redis_url: str) -> Config:
    bus = {"bus.url": redis_url, "bus.prefix": f"test-{uuid.uuid4().hex[:12]}"}
    overrides = {"bus.links": "redis", "engine.dtype": "float32", "pipeline.max_restarts": 1}
    return load_config(env={}, overrides={**bus, **overrides})


@pytest.fixture
def narrow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that carry little, so that no test needs much memory."""
    monkeypatch.setattr(redis_links, "MAX_MESSAGE_BYTES", 4096)


async def error_codes(client: BusClient, *requests: dict[str, Any]) -> list[str]:
    async with asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(*(client.complete(each) for each in requests))
    return [end.error.code if end.error else "" for end in ends]


@pytest.mark.usefixtures("narrow_links")
async def test_a_request_that_no_link_carries_is_dead_lettered_and_the_next_one_runs(
    redis_url: str,
) -> None:
    async with Pipeline(config_on(redis_url)) as pipeline:
        codes = await error_codes(pipeline.client, LARGE, GOOD, LARGE, GOOD)
        assert codes == ["message_too_large", "", "message_too_large", ""]
        letters = await pipeline.bus.requests.dead_letters()
        assert [len(each.request.prompt_token_ids or ()) for each in letters] == [2000, 2000]


@pytest.mark.usefixtures("narrow_links")
async def test_a_request_that_no_link_carries_is_dead_lettered_at_the_start(redis_url: str) -> None:
    config = config_on(redis_url)
    dead = open_bus(config.bus, frozenset())
    ids = [await dead.requests.publish(each) for each in (LARGE, GOOD)]
    async with asyncio.timeout(LIMIT_S):
        taken: list[Any] = []
        while len(taken) < 2:
            taken += await dead.requests.take(2)
    await dead.aclose()
    async with Pipeline(config) as pipeline, asyncio.timeout(LIMIT_S):
        ends = [
            [output async for output in pipeline.bus.results.follow("", entry_id)][-1]
            for entry_id in ids
        ]
    assert [getattr(end, "status", "") for end in ends] == ["error", "done"]


async def test_any_error_with_one_entry_ends_that_entry_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AdmissionCore.admit

    def admit(self: AdmissionCore, entry: Any, *args: Any, **kwargs: Any) -> Any:
        if entry.request.tenant == "poison":
            raise KeyError("x" * 100_000)
        return original(self, entry, *args, **kwargs)

    monkeypatch.setattr(AdmissionCore, "admit", admit)
    async with Pipeline(config_on(redis_url)) as pipeline:
        codes = await error_codes(pipeline.client, {**GOOD, "tenant": "poison"}, GOOD)
        assert codes == ["internal_error", ""]
        (letter,) = await pipeline.bus.requests.dead_letters()
        assert letter.request.tenant == "poison"
        assert len(letter.error.message) < MOST_TEXT


def test_a_batch_of_messages_is_cut_where_one_command_would_get_too_large() -> None:
    batch = [b"a" * 6, b"b" * 4, b"c", b"d" * 20, b"e"]
    cut = list(redis_links.within_bytes(batch, 10))
    assert cut == [[batch[0], batch[1]], [batch[2]], [batch[3]], [batch[4]]]

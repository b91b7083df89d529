"""The field `refused` of an entry: a client tells of its own request, in words that are known.

It is for requests that a client's library could not write down, and anybody can write it.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference.bus import Bus, Malformed, open_bus
from nano_inference.config import MOST_TEXT, BusConfig

LIMIT_S = 30


@pytest_asyncio.fixture
async def bus(redis_url: str) -> AsyncIterator[Bus]:
    made = open_bus(BusConfig(url=redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}"), frozenset())
    yield made
    await made.aclose()


async def take_one(bus: Bus) -> Malformed:
    async with asyncio.timeout(LIMIT_S):
        (entry,) = await bus.requests.take(1)
    assert isinstance(entry.request, Malformed)
    return entry.request


async def read_back(bus: Bus, redis_url: str, refused: object) -> Malformed:
    """What becomes of an entry that another program has written."""
    key = f"{bus.requests._config.prefix}:requests"  # type: ignore[attr-defined]
    async with Redis.from_url(redis_url) as redis:
        await redis.xadd(key, {"refused": msgspec.json.encode(refused)})
    return await take_one(bus)


@pytest.mark.parametrize(
    "code", ["internal_error", "shutting_down", "overloaded", "lane_failed", "anything", ""]
)
async def test_no_code_but_that_of_a_client_is_taken(bus: Bus, redis_url: str, code: str) -> None:
    refused = {"request_id": "mine", "code": code, "message": "pay here"}
    read = await read_back(bus, redis_url, refused)
    assert read.code == "malformed"
    assert "pay here" not in read.message


async def test_the_words_of_another_are_quoted_and_few(bus: Bus, redis_url: str) -> None:
    refused = {"request_id": "mine", "code": "invalid_request", "message": "pay\nhere " * 100_000}
    read = await read_back(bus, redis_url, refused)
    assert (read.request_id, read.code) == ("mine", "invalid_request")
    assert read.message.startswith(r"the client could not send the request: 'pay\nhere pay")
    assert len(read.message) < 200


async def test_our_own_sentence_is_no_way_in_for_others(bus: Bus, redis_url: str) -> None:
    message = "the request is nested too deeply: " + "\x1b[2J" * 10_000
    refused = {"request_id": "mine", "code": "invalid_request", "message": message}
    read = await read_back(bus, redis_url, refused)
    assert read.message.startswith(r"the request is nested too deeply: '\x1b[2J")
    assert len(read.message) < 200


async def test_what_is_larger_than_a_request_may_be_is_not_read(bus: Bus, redis_url: str) -> None:
    refused = {"request_id": "mine", "code": "invalid_request", "message": "x" * 5_000_000}
    read = await read_back(bus, redis_url, refused)
    assert (read.request_id, read.code) == ("", "malformed")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("\ud800", "lone surrogate"),
        (object(), "plain data .*object"),
    ],
)
async def test_what_a_client_could_not_send_is_said_as_before(
    bus: Bus, prompt: Any, words: str
) -> None:
    await bus.requests.publish({"request_id": "mine", "prompt": prompt})
    read = await take_one(bus)
    assert (read.request_id, read.code) == ("mine", "invalid_request")
    assert len(read.message) < MOST_TEXT
    assert re.search(words, read.message)

"""The field `refused` of an entry: a client tells of its own request, in words that are known.

It is for requests that a client's library could not write down, and anybody can write it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from nano_inference.bus import Bus, Malformed

from .conftest import Write

LIMIT_S = 30


async def take_one(bus: Bus) -> Malformed:
    async with asyncio.timeout(LIMIT_S):
        (entry,) = await bus.requests.take(1)
    assert isinstance(entry.request, Malformed)
    return entry.request


Read = Callable[..., Awaitable[Malformed]]


@pytest.fixture
def read_back(redis_bus: Bus, write_entry: Write) -> Read:
    """Write another program's refused entry, and return it as the bus reads it."""

    async def read(message: str, code: str = "invalid_request") -> Malformed:
        refused = {"request_id": "mine", "code": code, "message": message}
        await write_entry({"refused": msgspec.json.encode(refused)})
        return await take_one(redis_bus)

    return read


@pytest.mark.parametrize(
    "code", ["internal_error", "shutting_down", "overloaded", "lane_failed", "anything", ""]
)
async def test_no_code_but_that_of_a_client_is_taken(read_back: Read, code: str) -> None:
    read = await read_back("pay here", code)
    assert read.code == "malformed"
    assert "pay here" not in read.message


async def test_the_words_of_another_are_quoted_and_few(read_back: Read) -> None:
    read = await read_back("pay\nhere " * 100_000)
    assert (read.request_id, read.code) == ("mine", "invalid_request")
    assert read.message.startswith(r"the client could not send the request: 'pay\nhere pay")
    assert len(read.message) < 200


async def test_our_own_sentence_is_no_way_in_for_others(read_back: Read) -> None:
    read = await read_back("the request is nested too deeply: " + "\x1b[2J" * 10_000)
    assert read.message.startswith(r"the request is nested too deeply: '\x1b[2J")
    assert len(read.message) < 200


async def test_an_entry_above_the_size_limit_is_not_read(read_back: Read) -> None:
    read = await read_back("x" * 5_000_000)
    assert (read.request_id, read.code) == ("", "malformed")

"""Waiting for what happens on a bus, and builders of messages with short arguments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from nano_inference.bus import Inbox, OutputStream, RequestEntry, Sender, open_bus
from nano_inference.bus.envelope import Envelope, Message
from nano_inference.bus.messages import Credit
from nano_inference.bus.public import Completion, CompletionChunk, ErrorInfo, Output
from nano_inference.config import BusConfig, BusError

LIMIT_S = 20.0


def refusal(entry: RequestEntry, code: str, message: str = "because", **fields: Any) -> Completion:
    """The answer to an entry that is refused."""
    request_id = entry.request.request_id or entry.entry_id
    return failed(request_id, entry.entry_id, code, message, **fields)


def overloaded(entry: RequestEntry, waiting: int) -> Completion:
    """The answer to a request that is shed."""
    return refusal(entry, "overloaded", f"{waiting} wait", retry_after_s=2.0)


async def ping_error(config: BusConfig) -> str:
    """Why a bus does not reach its server."""
    bus = open_bus(config)
    try:
        with pytest.raises(
            BusError, check=lambda error: error.code == "bus_unavailable"
        ) as refused:
            await bus.ping()
    finally:
        await bus.aclose()
    return str(refused.value)


def credit(number: int) -> Credit:
    return Credit(sequences=number)


def chunk(request_id: str, entry_id: str, offset: int) -> CompletionChunk:
    return CompletionChunk(
        request_id=request_id,
        entry_id=entry_id,
        sample_index=0,
        token_offset=offset,
        token_ids=(offset,),
        logprobs=(-0.5,),
        text=f"t{offset}",
    )


def done(request_id: str, entry_id: str) -> Completion:
    return Completion(request_id=request_id, entry_id=entry_id, status="done", model="tiny")


def failed(
    request_id: str, entry_id: str, code: str, message: str = "because", **fields: Any
) -> Completion:
    error = ErrorInfo(code=code, message=message, **fields)
    return Completion(request_id=request_id, entry_id=entry_id, status="error", error=error)


async def receive(inbox: Inbox, count: int) -> list[Envelope]:
    """Receive exactly `count` messages."""
    received: list[Envelope] = []
    while len(received) < count:
        received += await inbox.receive(count - len(received))
    return received


async def bodies(inbox: Inbox, count: int) -> list[Message]:
    return [envelope.body for envelope in await receive(inbox, count)]


async def send_all(sender: Sender, numbers: range) -> None:
    for number in numbers:
        await sender.send(Credit(sequences=number))


async def collect(stream: OutputStream[Output]) -> list[Output]:
    return [output async for output in cast(AsyncIterator[Output], stream)]


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls until `holds`; fails after `LIMIT_S`."""
    end = time.monotonic() + LIMIT_S
    while not await holds():
        assert time.monotonic() < end, f"never came: {what}"
        await asyncio.sleep(0.01)


async def becomes(value: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Polls until the value is as wanted; fails after `LIMIT_S`."""
    end = time.monotonic() + LIMIT_S
    while (last := await value()) != wanted:
        assert time.monotonic() < end, f"it is {last!r}, and not {wanted!r}"
        await asyncio.sleep(0.01)


async def settled(value: Callable[[], int]) -> int:
    """The value once it has not changed for a while (a slow machine only makes it smaller)."""
    last, same = value(), 0
    while same < 15:
        await asyncio.sleep(0.01)
        last, same = (last, same + 1) if value() == last else (value(), 0)
    return last

"""The client whose commands share one connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import Redis

from nano_inference.store.redis import multiplexed
from nano_inference.store.redis.client import Server, execute, execute_all, transact

from ..buses import kit


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    server = Server(redis_url, f"multiplexed-{uuid.uuid4().hex}")
    redis = server.client()
    yield redis
    await redis.aclose()
    await server.aclose()


async def connections(client: Redis, foreign: Redis, flag: str = "") -> list[str]:
    """Return the ids of a client's connections; `flag`: b for blocked ones."""
    name = client.connection_pool.connection_kwargs["client_name"]
    clients = await foreign.client_list()
    return [each["id"] for each in clients if each["name"] == name and flag in each["flags"]]


async def test_concurrent_callers_share_a_connection_and_writes(
    client: Redis, foreign: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    flush = multiplexed._Line._flush

    def counted(line: Any) -> None:
        writes.append(len(line._unwritten))
        flush(line)

    monkeypatch.setattr(multiplexed._Line, "_flush", counted)
    callers = [
        asyncio.create_task(execute_all(client, [("ECHO", n), ("ECHO", n + 1)]))
        for n in range(0, 40, 2)
    ]
    refused = asyncio.create_task(execute(client, "NONE"))
    await asyncio.sleep(0)
    callers[4].cancel()
    replies = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(replies.pop(4), asyncio.CancelledError)
    assert replies == [[b"%d" % n, b"%d" % (n + 1)] for n in range(0, 40, 2) if n != 8]
    with pytest.raises(exceptions.ResponseError, match="unknown command"):
        await refused
    assert writes == [2, 2, 2, 2, 31], "the first at once, the others together"
    assert len(await connections(client, foreign)) == 1


async def test_a_broken_connection_fails_its_commands_and_is_replaced(
    client: Redis, foreign: Redis
) -> None:
    read = ("XREAD", "BLOCK", 10_000, "STREAMS", "none", "$")
    waiting = [asyncio.create_task(execute(client, *read)) for _ in range(2)]
    await kit.eventually(partial(connections, client, foreign, "b"), "a blocked connection")
    before = await connections(client, foreign)
    await foreign.client_kill_filter(_id=before[0])
    for each in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(each, exceptions.ConnectionError)
    assert await execute(client, "ECHO", "a") == b"a"
    assert before != await connections(client, foreign)


async def test_a_silent_connection_ends(client: Any) -> None:
    client.connection_pool.connection_kwargs["socket_timeout"] = 0.05
    assert await execute(client, "ECHO", "a") == b"a"
    with pytest.raises(exceptions.TimeoutError):
        await execute(client, "XREAD", "BLOCK", 10_000, "STREAMS", "none", "$")
    assert await execute(client, "ECHO", "b") == b"b"


async def test_a_demoted_master_is_left(client: Any) -> None:
    assert await execute(client, "ECHO", "a") == b"a"
    line = client._line
    with pytest.raises(exceptions.ReadOnlyError):
        await execute(client, "EVAL", "return redis.error_reply('READONLY it is a replica')", 0)
    assert not line.is_open
    assert await execute(client, "ECHO", "b") == b"b"


async def test_a_transaction_is_not_mixed_with_other_commands(client: Redis) -> None:
    other = asyncio.create_task(execute(client, "INCR", "multiplexed:counter"))
    found, *rest = await asyncio.gather(
        transact(client, b"", [("INCR", "multiplexed:counter"), ("GET", "multiplexed:counter")]),
        other,
        *(execute(client, "INCR", "multiplexed:counter") for _ in range(8)),
    )
    assert found[1] == b"%d" % found[0]
    assert sorted([found[0], *rest]) == list(range(1, 11))
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await transact(client, b"", [("LPUSH", "multiplexed:counter", 1)])
    await execute(client, "DEL", "multiplexed:counter")


async def test_closing_ends_waiting_commands(client: Redis, foreign: Redis) -> None:
    read = ("XREAD", "BLOCK", 10_000, "STREAMS", "none", "$")
    waiting = asyncio.create_task(execute(client, *read))
    await kit.eventually(partial(connections, client, foreign, "b"), "a blocked connection")
    await client.aclose()
    with pytest.raises(exceptions.ConnectionError):
        await waiting

"""The parts of a URL, and the error if no server answers."""

from __future__ import annotations

import socket
import uuid
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis import RedisError, exceptions
from redis.asyncio.connection import Connection, SSLConnection

from nano_inference.bus import open_bus
from nano_inference.config import BusConfig, BusError
from nano_inference.store.redis.address import Address, parse_address
from nano_inference.store.redis.client import Server, execute, execute_all, on_each

from ..buses import kit
from ..servers import SERVICE, Node, valkey


def test_a_single_server() -> None:
    kind, connection_class, options, *_ = parse_address("redis://u:p%40w@h:1/2")
    assert (kind, connection_class) == ("server", Connection)
    assert options == {"username": "u", "password": "p@w", "host": "h", "port": 1, "db": 2}


def test_sentinels() -> None:
    url = "redis+sentinel://u:p@a:1,b,[::1]:3/main/2?sentinel_password=s&health_check_interval=9"
    assert parse_address(url) == Address(
        "sentinel",
        Connection,
        {"username": "u", "password": "p", "db": 2, "health_check_interval": 9.0},
        (("a", 1), ("b", 26379), ("::1", 3)),
        "main",
        {"password": "s"},
    )


def test_a_cluster() -> None:
    address = parse_address("rediss+cluster://a,b:7")
    assert address == Address("cluster", SSLConnection, {}, (("a", 6379), ("b", 7)))
    assert address.tls


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h:1",
        "redis+sentinel:///main",
        "redis+sentinel://h:1,/main",
        "redis+sentinel://h:x/main",
        "redis+sentinel://h/main/0/1",
        "redis+cluster://h:1/0",
        "redis+cluster://",
        "redis+cluster://h?sentinel_password=s3cret",
        "redis+sentinel://h/main?sentinel_color=s3cret&color=1",
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(BusError, match="not a valid Redis URL") as caught:
        open_bus(BusConfig(url=url))
    assert "s3cret" not in str(caught.value)


async def test_an_unreachable_server_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        told = await kit.ping_error(BusConfig(url=f"redis+sentinel://u:s3cret@{host}/main"))
        assert told.startswith(f"no sentinel that answers at redis+sentinel://{host}/main knows")
        told = await kit.ping_error(BusConfig(url=f"redis+cluster://u:s3cret@{host}"))
        assert told.startswith(f"can't reach Redis at redis+cluster://{host}")


async def test_sentinels_without_the_masters_name_are_reported(tmp_path: Path) -> None:
    conf = f"sentinel monitor {SERVICE} 127.0.0.1 1 1"
    sentinel = Node(valkey(), tmp_path / "t", sentinel=conf)
    await sentinel.start()
    told = await kit.ping_error(BusConfig(url=f"redis+sentinel://{sentinel.address}/other"))
    assert "knows a live master 'other'" in told
    await sentinel.aclose()


async def test_a_server_that_is_no_cluster(redis_url: str) -> None:
    host = redis_url.removeprefix("redis://").partition("/")[0]
    told = await kit.ping_error(BusConfig(url=f"redis+cluster://{host}"))
    assert "cluster" in told.lower().partition(host)[2]


async def test_a_clusters_commands_are_read_once(cluster_url: str) -> None:
    """Not by each client, nor again whenever one connects."""

    async def times_asked() -> int:
        stats = await on_each(clients[0], "INFO", "commandstats")
        return sum(each.get("cmdstat_command", {}).get("calls", 0) for each in stats)

    server = Server(cluster_url)
    clients = [server.client() for _ in range(3)]
    await clients[0].initialize()
    before = await times_asked()
    for client in (*clients, clients[0]):
        key = uuid.uuid4().hex
        await execute_all(client, [("SET", key, "1"), ("XLEN", f"{key}x")])
        assert await execute(client, "GET", key) == b"1"
        await execute(client, "DEL", key)
        await client.aclose()
    assert await times_asked() == before
    with pytest.raises(RedisError, match="doesn't exist"):
        await execute_all(clients[0], [("NONE", "key")])
    assert await times_asked() == before + 1
    await clients[0].aclose()
    await server.aclose()


async def test_slots_are_read_anew_after_an_error_before_any_command(
    cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client itself does so only for errors of a command that it has sent; a master that has
    been replaced would be called for ever."""
    server = Server(cluster_url)
    client: Any = server.client()
    await execute(client, "SET", "a", "1")
    reads = AsyncMock(side_effect=client.nodes_manager.initialize)
    monkeypatch.setattr(type(client.nodes_manager), "initialize", reads)
    for attempt in (
        partial(execute, client, "GET", "a"),
        partial(execute_all, client, [("GET", "a")]),
    ):
        with monkeypatch.context() as patch:
            gone = AsyncMock(side_effect=exceptions.ConnectionError("refused"))
            patch.setattr(client.commands_parser, "get_keys", gone)
            with pytest.raises(exceptions.ConnectionError):
                await attempt()
        before = reads.await_count
        assert await attempt() in (b"1", [b"1"])
        assert reads.await_count == before + 1
    await client.aclose()
    await server.aclose()

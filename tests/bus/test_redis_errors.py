"""What a RedisBus says when the server is away, too old, or refuses it, and what it never says."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from nano_inference.bus import open_bus
from nano_inference.config import BusConfig, BusError, redact
from nano_inference.store.redis.client import check_version

from ..buses import kit
from ..cli.servers import free_port


async def test_refused_connection_says_what_to_do() -> None:
    port = free_port()
    message = await kit.ping_error(BusConfig(url=f"redis://user:s3cret@127.0.0.1:{port}/0"))
    assert message == (
        f"can't reach Redis at redis://127.0.0.1:{port}/0: connection refused; "
        "start it, or pass --bus with the right URL"
    )
    assert "No such file" in await kit.ping_error(BusConfig(url="unix:///nowhere/redis.sock"))


async def test_wrong_password_says_so(redis_url: str, foreign: Redis) -> None:
    await foreign.execute_command("ACL", "SETUSER", "tester", "on", ">right", "~*", "+@all")
    address = redis_url.removeprefix("redis://")
    bus = open_bus(BusConfig(url=f"redis://tester:right@{address}"))
    await bus.ping()
    await bus.aclose()
    message = await kit.ping_error(BusConfig(url=f"redis://tester:s3cret@{address}"))
    assert "refused user or password" in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://u:p@h:1/2?ssl=1", "redis://h:1/2"),
        ("redis://:p@q@h", "redis://h"),
        ("redis://h?password=p", "redis://***"),
        ("unix:///tmp/s.sock?db=1", "unix:///tmp/s.sock"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize("version", ["6.2.14", "", "nonsense"])
def test_old_server_is_refused(version: str) -> None:
    with pytest.raises(BusError, match=r"7\.0 or newer"):
        check_version({"redis_version": version}, "redis://h")
    for new in ("7.0.0", "7.2.4", "8.1"):
        check_version({"redis_version": new}, "redis://h")

"""Clients of a simulated server, with the part of redis-py's interface that the bus uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from nano_inference.store.redis.client import REPLY_TIMEOUT_S, Server
from nano_inference.store.redis.multiplexed import MultiplexedRedis

from ..loop import PROCESS
from .commands import Arguments
from .data import RedisError
from .network import Exchange, Network


class SimulatedServer(Server):
    """`Server` whose clients are in this process."""

    network: Network
    """Set for a simulation in a subclass."""

    def client(self, block_s: float = 0.0, connected: Callable[[], object] | None = None) -> Redis:
        return SimulatedClient(self.network, block_s, connected)

    async def aclose(self) -> None:
        """There are no sentinels."""


class SimulatedClient(MultiplexedRedis):
    """A client whose commands may overtake each other on their way, which those on one connection
    don't."""

    def __init__(
        self, network: Network, block_s: float, connected: Callable[[], object] | None
    ) -> None:
        self._network = network
        self._connected = connected
        self._breaks = -1  # of this process's connections, when it connected
        self._timeout_ns = int((REPLY_TIMEOUT_S + block_s) * 1e9)

    def __del__(self) -> None:
        """There is no connection to be closed."""

    def begin(self, commands: Sequence[Sequence[Any]]) -> asyncio.Future[list[Any]]:
        owner = PROCESS.get()
        if self._connected is not None and self._breaks != self._network.breaks_of(owner):
            self._breaks = self._network.breaks_of(owner)
            self._connected()
        raw = [[_encoded(each) for each in command] for command in commands]
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        node = self._network.node_of(owner)
        self._network.send(Exchange(raw, future, owner, node, self._timeout_ns))
        return future

    async def execute_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if not commands:
            return []
        if commands[0][0] == "MULTI":
            # A round trip is atomic here.
            found = await self.begin(commands[1:-1])
            replies = [_error(each) if isinstance(each, RedisError) else each for each in found]
            return [replies]
        raw = [[_encoded(each) for each in command] for command in commands]
        replies = await self.begin(raw)
        return [parsed(command, reply) for command, reply in zip(raw, replies, strict=True)]

    def pipeline(self, *args: Any, **options: Any) -> Any:
        return _Pipeline(self)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Nothing is open between commands."""


class _Pipeline:
    """An optimistic transaction."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client
        self._commands: list[tuple[Any, ...]] = []
        self._watched: Any = None
        self._before: Any = None
        # Between `watch` and `multi` commands run at once.
        self._reads = True

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def execute_command(self, *command: Any) -> Any:
        if self._reads:
            return self._client.execute_command(*command)
        self._commands.append(command)
        return self

    async def watch(self, key: Any) -> None:
        """Remember a key's value, which `execute` compares."""
        found = await self._client.execute_all([("GET", key), ("HGETALL", key)])
        text, fields = (None if isinstance(each, Exception) else each for each in found)
        self._watched, self._before = key, text if text is not None else fields

    def multi(self) -> None:
        """Queue the following commands."""
        self._reads = False

    async def execute(self) -> None:
        """Run the queued commands, if the value is as it was."""
        encoded = [
            _encoded(each) for command in self._commands for each in (len(command), *command)
        ]
        before = repr(self._before or None).encode()
        raw = [b"WATCHED", _encoded(self._watched), before, *encoded]
        if await self._client.execute_command(*raw) is None:
            raise exceptions.WatchError("Watched variable changed.")


def _encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return repr(value).encode() if isinstance(value, float) else str(value).encode()


def parsed(command: Arguments, reply: Any) -> Any:
    """Return a reply as redis-py does with RESP3."""
    if isinstance(reply, RedisError):
        return _error(reply)
    name = command[0]
    if name in (b"XRANGE", b"XREVRANGE") or (name == b"XCLAIM" and command[-1] != b"JUSTID"):
        return _pairs(reply)
    if name in (b"XREAD", b"XREADGROUP"):
        return {key: _pairs(entries) for key, entries in (reply or {}).items()}
    if name == b"TIME":
        return int(reply[0]), int(reply[1])
    if name == b"INFO":
        lines = (line.partition(":") for line in reply.decode().split())
        return {key: value for key, _, value in lines}
    if name == b"XPENDING" and len(command) == 3:
        return {"pending": reply[0]}
    if name == b"SET" and b"GET" not in command:
        return True if reply is not None else None
    if name == b"EXPIRE":
        return bool(reply)
    return reply


def _error(error: RedisError) -> exceptions.ResponseError:
    code, _, rest = str(error).partition(" ")
    return exceptions.ResponseError(rest if code == "ERR" else str(error))


def _pairs(entries: list[Any]) -> list[Any]:
    return [
        (entry_id, None if fields is None else dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry_id, fields in entries
    ]

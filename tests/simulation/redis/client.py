"""Clients of a simulated server, with the part of redis-py's interface that the bus uses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from redis import exceptions
from redis.asyncio import Redis

from nano_inference.store.redis.client import REPLY_TIMEOUT_S, Server

from ..loop import PROCESS
from .commands import Arguments
from .data import RedisError
from .network import Exchange, Network


class SimulatedServer(Server):
    """`Server` whose clients are in this process."""

    network: Network
    """Set for a simulation in a subclass."""

    def client(
        self,
        connections: int,
        block_s: float = 0.0,
        connected: Callable[[], object] | None = None,
    ) -> Redis:
        made = SimulatedClient(self.network, connections, block_s, connected)
        return made  # type: ignore[return-value]

    async def aclose(self) -> None:
        """There are no sentinels."""


class SimulatedClient:
    """A pool of connections. A command takes a free one, and breaks it when it is cancelled."""

    def __init__(
        self,
        network: Network,
        connections: int,
        block_s: float,
        connected: Callable[[], object] | None,
    ) -> None:
        self._network = network
        self._connected = connected
        self._breaks = -1  # of this process's connections, when it connected
        self._free = connections
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timeout_ns = int((REPLY_TIMEOUT_S + block_s) * 1e9)

    async def execute_command(self, *command: Any, **options: Any) -> Any:
        (reply,) = await self.exchange([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, transaction: bool) -> _Pipeline:
        return _Pipeline(self)

    async def aclose(self) -> None:
        """Nothing is open between commands."""

    async def exchange(
        self, commands: Iterable[Iterable[Any]], *, unparsed: bool = False
    ) -> list[Any]:
        """Send commands in one round trip; returns replies, and errors."""
        raw = [
            [each if type(each) is bytes else _encoded(each) for each in command]
            for command in commands
        ]
        if not raw:
            return []
        while not self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        self._free -= 1
        try:
            owner = PROCESS.get()
            if self._connected is not None and self._breaks != self._network.breaks_of(owner):
                self._breaks = self._network.breaks_of(owner)
                self._connected()
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            node = self._network.node_of(owner)
            self._network.send(Exchange(raw, future, owner, node, self._timeout_ns))
            replies = await future
        finally:
            self._free += 1
            self._pass_on()
        if unparsed:
            return [_error(each) if isinstance(each, RedisError) else each for each in replies]
        return [parsed(command, reply) for command, reply in zip(raw, replies, strict=True)]

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class _Pipeline:
    """Commands for one round trip; after `watch`, an optimistic transaction."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client
        self._commands: list[tuple[Any, ...]] = []
        self._watched: tuple[Any, ...] | None = None
        self._before: Any = None
        # Between `watch` and `multi` commands run at once.
        self._reads = False

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def execute_command(self, *command: Any, **options: Any) -> Any:
        if self._reads:
            return self._client.execute_command(*command)
        self._commands.append(command)
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        if self._watched is not None:
            return await self._execute_if_unchanged(commands)
        if commands and commands[0][0] == "MULTI":
            # A round trip is atomic here.
            return [await self._client.exchange(commands[1:-1], unparsed=True)]
        replies = await self._client.exchange(commands)
        if raise_on_error:
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    async def watch(self, key: Any) -> None:
        """Remember a key's value, which `execute` compares."""
        self._watched, self._reads = ("GET", key), True
        self._before = await self._read(key)

    async def _read(self, key: Any) -> Any:
        found = await self._client.exchange([("GET", key), ("HGETALL", key)])
        return [None if isinstance(each, Exception) else each for each in found]

    def multi(self) -> None:
        """Queue the following commands."""
        self._reads = False

    async def _execute_if_unchanged(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        assert self._watched is not None
        key = self._watched[1]
        encoded = [_encoded(each) for command in commands for each in (len(command), *command)]
        before = self._before[0] if self._before[0] is not None else self._before[1]
        raw = [b"WATCHED", _encoded(key), repr(before or None).encode(), *encoded]
        (reply,) = await self._client.exchange([raw])
        if reply is None:
            raise exceptions.WatchError("Watched variable changed.")
        if isinstance(reply, Exception):
            raise reply
        return [reply]


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

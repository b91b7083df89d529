"""The network between simulated processes and a Redis server: delays, and what can go wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from functools import partial
from random import Random
from typing import Any

from redis import exceptions

from ..loop import SimulatedProcess
from .commands import Arguments, Engine, among, reading
from .data import Data, RedisError
from .scripts import run_script

MS = 1_000_000
REFUSED_NS = 300_000
"""After this time a connection to a server that is down is refused."""

_WORLD = Context()
"""No process: a message on its way survives its sender."""


class Node:
    """One server process.

    Attributes:
        up: Whether it takes commands.
        blocked: Exchanges that wait for an entry, by stream.
    """

    def __init__(self, run_id: str) -> None:
        self.engine = Engine(run_script)
        self.engine.run_id = run_id
        self.up = True
        self.blocked: dict[bytes, list[Exchange]] = {}


class Exchange:
    """Commands on their way over one connection, and their replies.

    Attributes:
        waits_for: Streams whose next entry it waits for.
    """

    __slots__ = (
        *("commands", "done", "future", "lost", "node", "owner", "sent_ns", "timeout_ns"),
        "waits_for",
    )

    def __init__(
        self,
        commands: list[Arguments],
        future: asyncio.Future[list[Any]],
        owner: SimulatedProcess | None,
        node: Node,
        timeout_ns: int,
    ) -> None:
        self.commands = commands
        self.future = future
        self.owner = owner
        self.node = node
        self.timeout_ns = timeout_ns
        self.sent_ns = 0
        self.waits_for: dict[bytes, None] = {}
        self.done = self.lost = False


class Network:
    """Connections of processes to a Redis server.

    Attributes:
        node: The master that new connections reach.
        clock_offset_ns: Offset of the server's clock, in nanoseconds.
        slow: Factor of all delays.
        noise: Exchanges in a thousand that lose their connection.
        record: Called with each command that a server runs, and its reply.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        random: Random,
        epoch_ns: int,
    ) -> None:
        """Args:
        loop: Runs deliveries.
        now_ns: Simulated time.
        random: Draws delays.
        epoch_ns: Wall time at simulated time 0.
        """
        self._loop = loop
        self._now_ns = now_ns
        self._random = random.random
        self._epoch_ns = epoch_ns
        self._starts = 0
        self.clock_offset_ns = 0
        self.slow = 1.0
        self.noise = 0
        self.is_instant = False
        self.record: Callable[[SimulatedProcess | None, Arguments, Any], None] | None = None
        self.node = self._start(Data())
        self._open: dict[Exchange, None] = {}
        # How often the connections of all, and those of each process, were broken.
        self._stops = 0
        self._resets: Counter[SimulatedProcess | None] = Counter()
        # Processes cut off, and deliveries that wait for the end of that.
        self._cut: dict[SimulatedProcess, list[Callable[[], None]]] = {}
        # Processes whose connections still reach a former master.
        self._former: dict[SimulatedProcess | None, Node] = {}

    # --- exchanges ----------------------------------------------------------------------------

    def send(self, exchange: Exchange) -> None:
        """Send commands to the server; their replies are set in the exchange's future."""
        self._open[exchange] = None
        exchange.sent_ns = self._now_ns()
        if exchange.owner in self._cut:
            self._time_out(exchange)
        self._later(exchange.owner, self._arrive, exchange)
        if self.noise and self._random() * 1000 < self.noise:
            delay_s = self._random() * 0.002
            self._loop.call_later(delay_s, lambda: self._break(exchange), context=_WORLD)

    def breaks_of(self, owner: SimulatedProcess | None) -> int:
        """Return how often all connections of a process were broken."""
        return self._stops + self._resets[owner]

    def node_of(self, owner: SimulatedProcess | None) -> Node:
        return self._former.get(owner, self.node) if self._former else self.node

    def draw_delay_ns(self) -> int:
        """Return how long a message takes."""
        draw = self._random()
        if draw > 0.98:  # a packet lost, a busy host
            return int(20 * MS * (draw - 0.98) / 0.02 * self.slow)
        return int((50_000 + 400_000 * draw) * self.slow)

    def _later(
        self, owner: SimulatedProcess | None, deliver: Callable[..., None], *args: Any
    ) -> None:
        if owner in self._cut:
            self._cut[owner].append(partial(deliver, *args))
        elif self.is_instant:
            self._loop.call_soon(deliver, *args, context=_WORLD)
        else:
            self._loop.call_later(self.draw_delay_ns() / 1e9, deliver, *args, context=_WORLD)

    def _arrive(self, exchange: Exchange) -> None:
        node = exchange.node
        if exchange.lost:
            return
        if exchange.owner in self._cut:
            self._cut[exchange.owner].append(partial(self._arrive, exchange))
            return
        if not node.up:
            error = exceptions.ConnectionError("Connection refused")
            self._loop.call_later(
                REFUSED_NS / 1e9, lambda: self._fail(exchange, error), context=_WORLD
            )
            return
        replies = []
        for command in exchange.commands:
            if command[0] in (b"XREAD", b"XREADGROUP") and b"BLOCK" in command:
                reply = self.run(node, command, exchange.owner)
                if reply is None:
                    self._block(exchange, command)
                    return
                replies.append(reply)
            else:
                replies.append(self.run(node, command, exchange.owner))
        self._wake(node)
        self._reply(exchange, replies)

    def run(self, node: Node, command: Arguments, owner: SimulatedProcess | None = None) -> Any:
        """Run a command on a server; returns its reply, or the error."""
        node.engine.now_ms = self.server_ms()
        try:
            reply = node.engine.run(command)
        except RedisError as error:
            reply = error
        if self.record is not None:
            self.record(owner, command, reply)
        return reply

    def server_ms(self) -> int:
        """Return the server's clock."""
        return (self._epoch_ns + self._now_ns() + self.clock_offset_ns) // MS

    def _reply(self, exchange: Exchange, replies: list[Any]) -> None:
        if not exchange.done:
            self._later(exchange.owner, self._deliver, exchange, replies)

    def _deliver(self, exchange: Exchange, replies: list[Any]) -> None:
        if exchange.owner in self._cut:
            self._cut[exchange.owner].append(partial(self._deliver, exchange, replies))
            return
        if self._end(exchange) and not exchange.future.done():
            exchange.future.set_result(replies)

    def _end(self, exchange: Exchange) -> bool:
        self._open.pop(exchange, None)
        ended, exchange.done = exchange.done, True
        return not ended and (exchange.owner is None or exchange.owner.alive)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        if self._end(exchange) and not exchange.future.done():
            exchange.future.set_exception(error)

    def _block(self, exchange: Exchange, command: Arguments) -> None:
        _, block, positions = reading(command)
        blocked = exchange.node.blocked
        exchange.waits_for = dict.fromkeys(key for key, _ in positions)
        for key in exchange.waits_for:
            if key in blocked:
                blocked[key].append(exchange)
            else:
                blocked[key] = [exchange]
        delay_s = (block or 0) / 1e3
        self._loop.call_later(delay_s, lambda: self._unblock(exchange, None), context=_WORLD)

    def _unblock(self, exchange: Exchange, reply: Any) -> None:
        keys, exchange.waits_for = exchange.waits_for, {}
        blocked = exchange.node.blocked
        for key in keys:
            waiting = blocked[key]
            if len(waiting) > 1:
                waiting.remove(exchange)
            else:
                del blocked[key]
        if keys:
            self._reply(exchange, [reply])

    def _wake(self, node: Node) -> None:
        written, node.engine.written = node.engine.written, set()
        if not written or not node.blocked:
            return
        for key in sorted(written):
            for exchange in list(node.blocked.get(key, ())):
                if exchange.done or (exchange.owner is not None and not exchange.owner.alive):
                    self._unblock(exchange, None)
                    continue
                command = exchange.commands[0]
                if command[0] == b"XREAD":  # all other streams are as they were
                    command = among(command, written)
                reply = self.run(node, command, exchange.owner)
                if reply is not None:
                    self._unblock(exchange, reply)

    def _time_out(self, exchange: Exchange) -> None:
        left_ns = exchange.sent_ns + exchange.timeout_ns - self._now_ns()
        error = exceptions.TimeoutError("Timeout reading from the server")
        self._loop.call_later(left_ns / 1e9, lambda: self._fail(exchange, error), context=_WORLD)

    # --- faults -------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Exchanges that wait for replies."""
        return len(self._open)

    def reset(self, owner: SimulatedProcess | None) -> None:
        """Break all connections of a process; commands on their way may arrive all the same."""
        self._resets[owner] += 1
        for exchange in [each for each in self._open if each.owner is owner]:
            self._break(exchange)

    def _break(self, exchange: Exchange) -> None:
        exchange.lost = self._random() < 0.5
        self._fail(exchange, exceptions.ConnectionError("Connection reset by peer"))

    def forget(self, owner: SimulatedProcess) -> None:
        """Close the connections of a process that was killed."""
        self.reset(owner)
        self._cut.pop(owner, None)
        self._former.pop(owner, None)

    def drop(self) -> None:
        """Forget what is on its way."""
        self._open.clear()
        self._cut.clear()
        self.node.blocked.clear()

    def cut(self, owner: SimulatedProcess) -> None:
        """Deliver nothing from or to a process."""
        if owner not in self._cut:
            self._cut[owner] = []
            for exchange in [each for each in self._open if each.owner is owner]:
                self._time_out(exchange)

    def join(self, owner: SimulatedProcess) -> None:
        """End `cut`: what is still waited for arrives."""
        for deliver in self._cut.pop(owner, ()):
            self._later(owner, deliver)

    def stop(self) -> None:
        """Stop the server."""
        self.node.up = False
        self._stops += 1
        for exchange in [each for each in self._open if each.node is self.node]:
            self._break(exchange)
            exchange.lost = True

    def snapshot(self) -> Data:
        """Return the server's data as it is now."""
        return self.node.engine.data.copy()

    def start(self, data: Data) -> None:
        """Start the server with this data."""
        self.node = self._start(data)

    def fail_over(self, data: Data, owners: list[SimulatedProcess]) -> None:
        """Make a replica with this data the master; `owners` don't know it yet."""
        old, self.node = self.node, self._start(data)
        for owner in [each for each in self._former if each not in owners]:
            self.reset(owner)  # it has not known the last master yet
        self._former = dict.fromkeys(owners, old)

    def learn(self, owner: SimulatedProcess) -> None:
        """Break the connections of a process to the former master."""
        if self._former.pop(owner, None) is not None:
            self.reset(owner)

    def _start(self, data: Data) -> Node:
        self._starts += 1
        node = Node(f"{self._starts:040x}")
        node.engine.data = data
        return node

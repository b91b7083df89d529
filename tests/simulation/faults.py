"""The faults of a simulation, begun and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, Protocol

import msgspec

from nano_inference.pipeline.client import BusClient
from nano_inference.stages.actor import Actor

from .calls import Call
from .loop import SimulatedLoop, SimulatedProcess
from .orders import Notes, obey
from .redis.data import Data, names_of
from .redis.network import MS, Network
from .story import Fault, Story

ORDERS = ("weights", "adapter", "hold", "flush")


class SimulatedCrash(Exception):
    """An error in a stage, on purpose."""


class Struck(Notes, Protocol):
    """The parts of a simulation that faults change; `World` has the attributes."""

    story: Story
    loop: SimulatedLoop
    network: Network
    processes: dict[str, SimulatedProcess]
    clients: dict[int, tuple[SimulatedProcess | None, BusClient]]
    calls: dict[str, Call]
    slow: float
    losable: set[str]

    def at(self, at_ms: int, action: Callable[[], object]) -> None:
        """Run an action at a time, outside all processes."""

    def actors(self) -> Iterator[Actor]:
        """Return the stages of all living programs."""

    def start(self, program: str) -> None:
        """Start a program."""

    def replace(self, program: str, process: SimulatedProcess) -> None:
        """Start a program although its process may go on."""

    def start_client(self, number: int) -> None:
        """Start a client."""

    def kill(self, program: str) -> None:
        """End a program at once."""


class Faults:
    """The faults of a story.

    Attributes:
        num_open: Faults that have not ended.
    """

    def __init__(self, world: Struck, random: Random) -> None:
        self._world = world
        self._random = random
        # The server's data as it was, by the number of the fault that goes back to it.
        self._snapshots: dict[int, Any] = {}
        self.num_open = 0

    def begin(self) -> None:
        """Set the times of all faults."""
        world = self._world
        self.num_open = len(world.story.faults)
        for number, fault in enumerate(world.story.faults):
            if fault.kind in ("restart", "failover") and fault.amount:
                world.at(max(0, fault.at_ms - fault.amount), partial(self._snap, number))
            world.at(fault.at_ms, partial(self._strike, number, fault))

    def drop(self) -> None:
        """Forget all data."""
        self._snapshots.clear()

    def _snap(self, number: int) -> None:
        self._snapshots[number] = self._world.network.snapshot()

    def _strike(self, number: int, fault: Fault) -> None:
        world = self._world
        world.note("fault", msgspec.json.encode(fault).decode())
        if fault.kind in ORDERS:
            self._order(fault)
            return
        end = self._end_of(number, fault)
        if end is None:
            self.num_open -= 1
            return

        def finish() -> None:
            world.note("fault over", fault.kind)
            end()
            self.num_open -= 1

        world.at(world.loop.now_ns // MS + max(1, fault.lasts_ms), finish)

    def _order(self, fault: Fault) -> None:
        world = self._world
        if not world.clients:
            self.num_open -= 1
            return
        process, client = world.clients[min(world.clients)]
        assert process is not None

        async def order() -> None:
            try:
                await obey(world, client, fault)
            finally:
                self.num_open -= 1

        world.loop.start(process, order())

    def _end_of(self, number: int, fault: Fault) -> Callable[[], object] | None:
        """Begin a fault; return what ends it."""
        world, network = self._world, self._world.network
        process = world.processes.get(fault.target)
        match fault.kind:
            case "kill" if process is not None:
                world.kill(fault.target)
                if fault.target.startswith("client"):
                    client = int(fault.target.removeprefix("client"))
                    return partial(world.start_client, client)
                return partial(world.start, fault.target)
            case "double" if process is not None:
                world.loop.pause(process)
                at_ms = world.loop.now_ns // MS + fault.amount
                world.at(at_ms, partial(world.replace, fault.target, process))
                return partial(world.loop.resume, process)
            case "crash":
                self._crash(fault.target)
            case "pause" if process is not None:
                world.loop.pause(process)
                return partial(world.loop.resume, process)
            case "reset" if process is not None:
                network.reset(process)
            case "cut" if process is not None:
                network.cut(process)
                return partial(network.join, process)
            case "vanish":
                return self._vanish(fault)
            case "garbage" if network.node.up:
                network.run(network.node, [b"XADD", b"nano:requests", b"*", b"json", b"{"])
            case "restart" if network.node.up:
                network.stop()
                return partial(network.start, self._lose(number))
            case "failover" if network.node.up:
                return self._fail_over(number, fault)
            case "clock" if process is not None:
                process.wall_offset_ns += fault.amount * MS
            case "clock":
                network.clock_offset_ns += fault.amount * MS
            case "slow":
                world.slow = network.slow = float(fault.amount)

                def restore() -> None:
                    world.slow = network.slow = 1.0

                return restore
        return None

    def _lose(self, number: int) -> Data:
        """Return the data that a server comes back with; note the requests that are not in it."""
        data = self._snapshots.get(number) or self._world.network.snapshot()
        kept = set(names_of(data))
        self._world.losable |= self._world.calls.keys() - kept
        return data

    def _fail_over(self, number: int, fault: Fault) -> Callable[[], object]:
        world = self._world
        owners = list(world.processes.values())
        old = world.network.node
        world.network.fail_over(self._lose(number), owners)
        for owner in owners:
            # Until then a process may still write to the former master.
            after_ms = self._random.randrange(max(1, fault.lasts_ms))
            at_ms = world.loop.now_ns // MS + after_ms
            world.at(at_ms, partial(world.network.learn, owner))

        def end() -> None:
            old.up = False

        return end

    def _vanish(self, fault: Fault) -> Callable[[], object]:
        """Cut off the host of a replica; the others must continue its requests meanwhile."""
        world = self._world
        host = f"0.{fault.target}"
        hosts = [each for each in world.processes.values() if each.host == host]
        for process in hosts:
            world.network.cut(process)
        began_ms = world.loop.now_ns // MS

        def end() -> None:
            waiting = [
                name
                for name, call in world.calls.items()
                if call.request.at_ms < began_ms and not call.ended
            ]
            if waiting and len(world.story.faults) == 1:
                world.violate(f"{', '.join(waiting)} waited for a host that had vanished")
            for process in hosts:
                world.network.join(process)

        return end

    def _crash(self, stage: str) -> None:
        """Make each actor of a stage fail at its next message, before or after it is handled."""
        for actor in list(self._world.actors()):
            if actor.name != stage or not actor.holds_all:
                continue
            handle, late = actor.handle, self._random.random() < 0.5

            async def fail(envelope: Any, handle: Any = handle, late: bool = late) -> None:
                if late:
                    await handle(envelope)
                raise SimulatedCrash("on purpose")

            actor.handle = fail  # type: ignore[method-assign]

"""An operator's orders: new weights and adapters, pauses of generation, an emptied cache."""

from __future__ import annotations

from typing import Protocol

import anyio

from nano_inference.bus.weights import FolderWeights
from nano_inference.config import NanoInferenceError
from nano_inference.pipeline.client import BusClient

from .settings import folder_of
from .story import Fault

ORDER_S = 60.0
"""So long an operator waits."""


class Notes(Protocol):
    """The parts of a simulation that an order changes."""

    updates: int

    @property
    def is_disturbed(self) -> bool:
        """Whether a lane may fail, and leave an order without an answer."""

    def violate(self, what: str) -> None:
        """Note that something is wrong."""

    def note(self, *parts: str) -> None:
        """Write a line of the trace."""


async def obey(world: Notes, client: BusClient, fault: Fault) -> None:
    """Give an order, and end it."""
    try:
        with anyio.move_on_after(ORDER_S) as scope:
            await _give(world, client, fault)
        if scope.cancelled_caught and not world.is_disturbed:
            world.violate(f"the order {fault.kind} had no answer")
    except NanoInferenceError as error:
        world.note("order failed", fault.kind, error.code, error.message)
        # A lane that fails meanwhile doesn't answer.
        if error.code == "no_answer" and not world.is_disturbed:
            world.violate(f"the order {fault.kind}: {error.message}")
    finally:
        if fault.kind == "hold":
            await _go_on(world, client)


async def _give(world: Notes, client: BusClient, fault: Fault) -> None:
    match fault.kind:
        case "weights":
            world.updates += 1
            source = FolderWeights(folder_of(world.updates))
            await client.update_weights(source, in_flight=fault.mode)
        case "adapter":
            world.updates += 1
            folder = folder_of(world.updates)
            await client.load_adapter(fault.target, folder, in_flight=fault.mode)
        case "hold":
            await client.pause(fault.mode)
            await anyio.sleep(fault.lasts_ms / 1000)
        case "flush":
            await client.flush_cache()


async def _go_on(world: Notes, client: BusClient) -> None:
    """Resume generation in each lane that there is, until all have answered."""
    while True:
        try:
            await client.resume()
        except NanoInferenceError as error:
            world.note("not resumed", error.code, error.message)
            await anyio.sleep(1.0)
        else:
            return

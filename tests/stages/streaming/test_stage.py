"""The streaming stage's shell, on a bus in memory."""

from __future__ import annotations

import msgspec

from nano_inference.bus import MemoryBus
from nano_inference.bus.envelope import Envelope, Message
from nano_inference.bus.links import FINISHED
from nano_inference.bus.public import CompletionChunk
from nano_inference.bus.recovery import Fenced
from nano_inference.config import BusConfig, Config
from nano_inference.stages.actor import StageContext
from nano_inference.stages.streaming.stage import StreamingStage
from nano_inference.telemetry import Tracing

from .client import request_of, started, step


async def test_a_step_after_a_missing_one_is_not_delivered() -> None:
    """A server that comes back with old data has lost the one between; a new epoch is asked for."""
    bus, request = MemoryBus(BusConfig()), request_of()
    stage = StreamingStage(StageContext(Config(), bus, Tracing()))
    await stage.open()
    stage.epoch = 1
    admission = await bus.open_inbox(FINISHED.receiver)
    first = step([(5, 40, "")], new=[started(5, request)])
    third = msgspec.structs.replace(step([(5, 42, "")]), step_id=3)
    fourth = msgspec.structs.replace(step([(5, 43, "")]), step_id=4)

    async def handle(message: Message) -> None:
        await stage.handle(Envelope(message, 1, "executor-1"))
        await stage.tick()

    for message in (request, first, third, fourth):
        await handle(message)
    (chunk,) = (await bus.results.recover(["r"], 2))[0]
    assert isinstance(chunk, CompletionChunk)
    assert chunk.token_ids == (40,)
    (told,) = await admission.receive()
    assert told.body == Fenced((f"{request.entry_id} r",))

    await stage.reset()
    await handle(step([(80, 41, "")], new=[started(80, request, num_generated=1)]))
    assert len((await bus.results.recover(["r"], 3))[0]) == 2, "steps count from 1 in each epoch"
    await bus.aclose()

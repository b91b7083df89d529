"""Each stage process in turn is told to leave, under load: its successor goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from nano_inference import BusClient
from nano_inference.bus import StageReport
from nano_inference.bus.public import Output
from nano_inference.config import STAGES
from nano_inference.pipeline.health import lanes_of

from .test_life import check_stream, stream_request
from .test_processes import House

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 90
STREAMS = 10


@pytest.fixture(scope="module")
def house(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    log = tmp_path_factory.mktemp("rolling") / "log"
    running = House(redis_url, f"rolling-{uuid.uuid4().hex[:8]}", endpoint="", log=log)
    yield running
    assert running.stop() == 0


async def ready_stages(client: BusClient) -> dict[str, StageReport]:
    """The stages, once the board says that all of them take part."""
    while True:
        (*_, lane) = lanes_of(await client.bus.stages.read()) or [None]
        if lane is not None and lane.ready:
            return lane.stages
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_that_is_told_to_leave_is_replaced_and_every_stream_goes_on(
    house: House, stage: str
) -> None:
    async with asyncio.timeout(LIMIT_S), BusClient.connect(house.bus) as client:
        before = await ready_stages(client)
        begun = asyncio.Event()

        async def stream(index: int) -> None:
            outputs: list[Output] = []
            async for output in client.submit(stream_request(index)):
                outputs.append(output)
                begun.set()
            check_stream(index, outputs)

        async with asyncio.TaskGroup() as streams:
            for index in range(STREAMS):
                streams.create_task(stream(index))
            await begun.wait()
            os.kill(before[stage].pid, signal.SIGTERM)
        after = await ready_stages(client)
        while after[stage].pid == before[stage].pid:
            after = await ready_stages(client)
        unchanged = {name for name in STAGES if after[name].pid == before[name].pid}
        assert unchanged == set(STAGES) - {stage}
    log = house.log.read_text()
    assert f"{stage} was told to leave; starting its successor" in log
    assert "ended with status" not in log, "leaving in good order is no failure"

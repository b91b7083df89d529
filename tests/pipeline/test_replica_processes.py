"""`up` with two executors: one is killed, and the other goes on at once with what it had."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from pathlib import Path

import pytest

from nano_inference import BusClient
from nano_inference.config import all_roles
from nano_inference.pipeline.supervisor import LONGEST_WAIT_S
from nano_inference.store.board import StageReport

from .test_lanes import Streams
from .test_processes import House

pytestmark = pytest.mark.slow

LIMIT_S = 120


async def ready(client: BusClient, killed: int = 0) -> dict[str, StageReport]:
    """The stages that take part, by role, without the process that was killed: what it told last
    is known for a while."""
    reports = await client.bus.store.board.read()
    return {
        report.stage: report
        for report in reports
        if report.state == "ready" and report.pid != killed
    }


async def until_all_ready(client: BusClient) -> dict[str, StageReport]:
    while set(found := await ready(client)) != set(all_roles(2)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return found


async def test_a_killed_executor_leaves_its_work_to_the_other(
    redis_url: str, tmp_path: Path
) -> None:
    prefix = f"up-{uuid.uuid4().hex[:8]}"
    # The longest, so that its successor can't be what goes on. That one joins is shown where
    # it is given weights, in test_weights_restart.py.
    settings = {"pipeline.replicas": 2, "pipeline.restart_backoff_s": LONGEST_WAIT_S}
    log = tmp_path / "log"
    house = House(redis_url, prefix, endpoint="", log=log, settings=settings)
    try:
        async with asyncio.timeout(LIMIT_S), BusClient.connect(house.bus) as client:
            before = await until_all_ready(client)
            assert len({report.pid for report in before.values()}) == 7
            await asyncio.to_thread(check_status, house)
            streams = Streams(client)
            await streams.begin()
            killed = before["executor.1"].pid
            os.kill(killed, signal.SIGKILL)
            await streams.finish()
            while "executor" not in (after := await ready(client, killed)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert "executor.1" not in after, "its successor was not needed"
            assert after["executor"].pid == before["executor"].pid
            assert not await client.bus.requests.dead_letters()
        assert house.stop() == 0
    finally:
        if house.process.poll() is None:
            house.stop()


def check_status(house: House) -> None:
    """`status` and `top` show every replica."""
    for command in (["status", "--json"], ["status"], ["top", "--once"]):
        shown = house.told_by(*command)
        for role in all_roles(2):
            assert role in shown
        if "--json" in command:
            found = json.loads(shown)
            assert list(found["lanes"][0]["stages"]) == list(all_roles(2))
            assert "plans.1" in found["links"]

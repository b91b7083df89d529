"""The receivers of control messages."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from nano_inference.bus import open_bus
from nano_inference.config import BusConfig, BusError
from nano_inference.pipeline.stage_control import StageControl
from nano_inference.store.board import StageReport


async def test_a_stage_that_has_not_reported_yet_is_awaited() -> None:
    """It loads: a message to it would be lost, and its sender would wait in vain."""
    async with aclosing(open_bus(BusConfig(url="memory"))) as bus:
        control = StageControl(bus, "a test")
        with pytest.raises(BusError, match="loading or not running") as refused:
            await control.ready_recipients("executor", 0.0)
        assert refused.value.code == "no_answer"
        waiting = asyncio.create_task(control.ready_recipients("executor", 60.0))
        report = {"lane": "0", "stage": "executor", "host": "a", "pid": 1, "epoch": 0}
        await bus.store.board.report(
            [StageReport(**report, incarnation="executor-1", state="ready")]
        )
        async with asyncio.timeout(60):
            assert await waiting == [("0", "executor")]

"""What a supervisor says of a stage that fails."""

from __future__ import annotations

from typing import ClassVar

import pytest
from structlog.testing import capture_logs

from nano_inference.bus import MemoryBus
from nano_inference.bus.messages import Envelope
from nano_inference.config import Config, PipelineConfig
from nano_inference.pipeline.supervisor import StageFailed, supervise
from nano_inference.stages.actor import Actor, StageContext
from nano_inference.telemetry import Tracing


class Broken(Actor):
    """Fails in a way of its own at each start."""

    name: ClassVar[str] = "batching"
    ways: ClassVar[list[str]]

    async def open(self) -> None:
        raise RuntimeError(self.ways.pop())

    async def handle(self, envelope: Envelope) -> None: ...

    async def reset(self) -> None: ...


async def test_a_traceback_is_printed_once_for_each_way_to_fail() -> None:
    bus = MemoryBus(Config().bus)
    context = StageContext(Config(), bus, Tracing(None))
    Broken.ways = ["b", "b", "a", "a", "a"]
    with capture_logs() as lines, pytest.raises(StageFailed):
        await supervise(
            lambda: Broken(context), PipelineConfig(max_restarts=4, restart_backoff_s=0.0)
        )
    failures = [line for line in lines if line["event"] == "stage_failed"]
    assert [line["error"] for line in failures] == [
        f"RuntimeError('{way}')" for way in ("a", "a", "a", "b", "b")
    ]
    assert [bool(line["exc_info"]) for line in failures] == [True, False, False, True, False]
    await bus.aclose()

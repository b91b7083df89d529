"""The live feed: one read for all viewers, and none that waits for a slow one."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from nano_inference.bus.public import GenerateRequest
from nano_inference.config import BusError
from nano_inference.gateway.caller import ANYBODY, Caller
from nano_inference.gateway.console.feed import Feed, Viewer, viewer_of
from nano_inference.gateway.console.history import History, Point, RecordedHistory
from nano_inference.gateway.serving.request_log import RequestLog
from nano_inference.pipeline.health import lanes_of
from nano_inference.pipeline.progress import Progress
from nano_inference.pipeline.status import PipelineStatus
from nano_inference.store.batches import BatchProgress
from nano_inference.store.history import MinuteRecord
from nano_inference.store.records import MemoryRecords
from nano_inference.store.redis.keys import Keys

from ..fake import report

ALL = Viewer(None, None)

KEYS = Keys("test")


class Board:
    """A board that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0
        self.error: BusError | None = None
        self.read_often = anyio.Event()

    async def read(self) -> PipelineStatus:
        self.reads += 1
        if self.reads == 3:
            self.read_often.set()
        if self.error is not None:
            raise self.error
        stages = [
            report(stage="fairness", load={"settings": '{"tenant_weights": {"acme": 2}}'}),
            report(stage="streaming", load={"tokens_per_s": self.reads}),
        ]
        batches = [
            BatchProgress(
                id=tenant, tenant=tenant, endpoint="/score", status="in_progress", created_s=1,
                total=9, completed=1, failed=0, lines_per_s=2.0, seen_s=2,
            )
            for tenant in ("acme", "blue")
        ]  # fmt: skip
        return PipelineStatus(
            ready=True, reason="", waiting=0, in_flight=0, queue_length=0, dead_letters=0,
            lanes=lanes_of(stages), stall_timeout_s=60, progress=Progress(status="idle"),
            open_batches=2, batches=batches,
        )  # fmt: skip


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def log() -> RequestLog:
    return RequestLog()


@pytest.fixture
def feed(board: Board, log: RequestLog) -> Feed:
    gateway = {"waiting": 0, "in_flight": 0}
    return Feed(board.read, log, lambda: gateway, MinuteRecord(KEYS, MemoryRecords()), every_s=0.1)


async def first(feed: Feed, viewer: Viewer = ALL, number: int = 1) -> list[dict[str, Any]]:
    """The first snapshots of a viewer."""
    found: list[dict[str, Any]] = []
    async with aclosing(feed.snapshots(viewer)) as snapshots:
        async for name, data in snapshots:
            if name == "snapshot":
                found.append(json.loads(data))
            if len(found) == number:
                return found
    return found


async def test_many_viewers_cost_one_read_a_period(feed: Feed, board: Board) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(first, feed, ALL, 3)
    assert board.reads <= 4


async def test_charts_begin_before_a_page_is_open(feed: Feed, board: Board) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(feed.keep)
        with anyio.fail_after(5):
            await board.read_often.wait()
        group.cancel_scope.cancel()
    assert [each.tokens_per_s for each in feed.points(ALL)["seconds"]][:2] == [1, 2]
    assert feed.points(Viewer(None, ("tiny",)))["seconds"] == [], "it has the sums of all models"


def test_history_has_minutes_and_gaps() -> None:
    history = History(seconds=90, minutes=2)
    for second in range(60 * 4):
        known = second < 60 or second >= 150
        numbers = (second, 1, 2, 3, 4, 9, second // 100) if known else ()
        history.add(Point(second * 1000, *numbers))
    assert [each.at_ms for each in history.seconds] == [each * 1000 for each in range(150, 240)]
    found = [(each.at_ms, each.tokens_per_s) for each in history.minutes]
    assert found == [(60_000, None), (120_000, 164.5), (180_000, 209.5)]
    assert history.minutes[1].weights == 1


async def run(history: RecordedHistory, start: int, minutes: int) -> None:
    """A gateway that runs from the second minute on, with a point every 20 s."""
    for second in range(start * 60, (start + minutes) * 60, 20):
        await history.keep(Point(second * 1000, second, 1, 2, 3, 4, 9, 0))


async def test_a_restarted_gateway_has_the_minutes_of_the_day() -> None:
    record = MinuteRecord(KEYS, MemoryRecords())
    await run(RecordedHistory(record), start=0, minutes=4)
    again = RecordedHistory(record)
    await run(again, start=6, minutes=2)
    found = [(each.at_ms // 60_000, each.tokens_per_s) for each in again.minutes]
    assert found == [(0, 20), (1, 80), (2, 140), (6, 380), (7, 440)], "a gap, and no minute twice"
    assert len(again.seconds) == 6
    day = 24 * 60
    later = RecordedHistory(record)
    await run(later, start=day + 1, minutes=2)
    assert [each.at_ms // 60_000 for each in later.minutes] == [2, 6, day + 1, day + 2]
    assert [*await record.read()] == [each * 60_000 for each in (2, 6, day + 1)]


async def test_a_history_that_is_not_recorded_goes_on() -> None:
    class Refused(MinuteRecord):
        async def read(self) -> dict[int, bytes]:
            raise BusError("no permissions to run HGETALL")

    history = RecordedHistory(Refused(KEYS, MemoryRecords()))
    await run(history, start=0, minutes=3)
    assert len(history.minutes) == 3


async def test_a_slow_viewer_skips_snapshots(feed: Feed, board: Board) -> None:
    async with aclosing(feed.snapshots(ALL)) as snapshots:
        rates = []
        async for name, data in snapshots:
            if name == "snapshot":
                (lane,) = json.loads(data)["status"]["lanes"]
                rates.append(lane["stages"]["streaming"]["load"]["tokens_per_s"])
            if len(rates) == 2:
                break
            await anyio.sleep(0.35)
    assert rates[1] > rates[0] + 1
    assert rates[1] == board.reads


async def test_settings_that_name_tenants_are_left_out(feed: Feed) -> None:
    (found,) = await first(feed)
    assert "acme" not in json.dumps(found["status"]["lanes"])


async def test_without_the_bus_a_snapshot_says_so(feed: Feed, board: Board) -> None:
    board.error = BusError("Redis is away")
    (found,) = await first(feed)
    assert (found["status"], found["problem"]) == (None, "Redis is away")


async def test_a_tenants_key_shows_its_own_use_only(feed: Feed, log: RequestLog) -> None:
    for tenant in ("acme", "blue"):
        log.arrived(tenant, [GenerateRequest(request_id=tenant, prompt="x")], "tiny")
    caller = Caller(key_id="k", tenant="acme", scopes=frozenset({"read"}))
    (own,), (every,) = await first(feed, viewer_of(caller)), await first(feed, viewer_of(ANYBODY))
    assert [each["tenant"] for each in own["tenants"]] == ["acme"]
    assert {each["tenant"] for each in every["tenants"]} == {"acme", "blue"}
    assert [each["id"] for each in own["status"]["batches"]] == ["acme"]
    assert [each["id"] for each in every["status"]["batches"]] == ["acme", "blue"]


async def test_a_stopping_gateway_ends_the_streams(feed: Feed) -> None:
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(first, feed, ALL, 1000)
            await anyio.sleep(0.15)
            feed.close()

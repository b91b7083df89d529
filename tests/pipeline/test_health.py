"""Health of lanes, supervision of stages, and cancellations of clients."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, ClassVar

import pytest
from structlog.testing import capture_logs

from nano_inference import Pipeline
from nano_inference.bus import Inbox, MemoryBus, open_bus
from nano_inference.bus.control import StopSequences
from nano_inference.bus.envelope import Envelope
from nano_inference.bus.links import HALTS
from nano_inference.config import STAGES, BusConfig, Config, ModelError, PipelineConfig, Stage
from nano_inference.pipeline import cancellations
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.health import lanes_of, role_trouble, verdict
from nano_inference.pipeline.models import FACTS
from nano_inference.pipeline.pipeline import Heart
from nano_inference.pipeline.stage_control import SharedCall
from nano_inference.pipeline.supervisor import StageFailed, supervise
from nano_inference.stages.actor import Actor, StageContext
from nano_inference.store.board import StageReport
from nano_inference.telemetry import Tracing

from .conftest import MakeConfig, both_buses

# --- health ----------------------------------------------------------------------------------


def report(stage: str, **fields: Any) -> StageReport:
    given = {"lane": "0", "incarnation": stage, "host": "h", "pid": 1, "epoch": 5, "state": "ready"}
    return StageReport(stage=stage, **{**given, **fields})


def lane(name: str = "0", **changed: dict[str, Any]) -> list[StageReport]:
    """All five stages, some of them different."""
    return [report(stage, lane=name, **changed.get(stage, {})) for stage in STAGES]


def test_all_stages_ready() -> None:
    (found,) = lanes_of(lane())
    assert (found.ready, found.epoch, list(found.stages)) == (True, 5, list(STAGES))
    assert verdict([found]) == ""


def test_no_lane_is_a_reason() -> None:
    assert "nano-inference up" in verdict(lanes_of([]))


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        (lane()[:3], "no process runs executor, streaming"),
        (
            lane(batching={"state": "waiting", "reason": "the executor is not ready"}),
            "batching is waiting: the executor is not ready",
        ),
        (lane(executor={"age_s": 6.1}), "executor reported last 6 s ago"),
        (
            lane(executor={"process_state": "stopped", "pid": 7}),
            "executor is stopped; continue it with `kill -CONT 7`",
        ),
        (lane(executor={"process_state": "gone", "pid": 7}), "executor has ended (process 7)"),
        (lane(streaming={"epoch": 4}), "streaming has not come into the current epoch"),
    ],
)
def test_a_stage_that_is_not_ready_is_the_reason(reports: list[StageReport], reason: str) -> None:
    found = lanes_of(reports)
    assert not found[0].ready
    assert verdict(found) == reason


def replica(number: int, **changed: dict[str, Any]) -> list[StageReport]:
    """The stages of a further replica."""
    return [
        report(f"{stage}.{number}", **changed.get(stage, {})) for stage in ("batching", "executor")
    ]


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([*lane(), *replica(1)], ""),
        ([*lane(), *replica(1, executor={"epoch": 4})], ""),
        ([*lane(executor={"state": "starting", "reason": "it is loading"}), *replica(1)], ""),
        ([each for each in lane() if each.stage not in ("batching", "executor")], "0"),
        ([*(each for each in lane() if each.stage != "executor"), *replica(2)], ""),
        ([*lane(streaming={"epoch": 4}), *replica(1)], "streaming has not come into the"),
        ([*lane(executor={"epoch": 4}), *replica(1, batching={"epoch": 4})], "executor has not"),
    ],
)
def test_one_replica_is_enough(reports: list[StageReport], reason: str) -> None:
    (found,) = lanes_of(reports)
    if reason == "0":
        assert found.reason == "no process runs batching, executor"
    else:
        assert found.ready == (not reason)
        assert found.reason.startswith(reason)
    assert {each.stage for each in reports} == set(found.stages)


@pytest.mark.parametrize(
    ("roles", "changed", "prefill", "decode"),
    [
        ("", {}, "", ""),
        ("prefill,decode", {}, "", ""),
        ("prefill,decode", {"executor": {"epoch": 4}}, "", "executor.1 has not come"),
        ("prefill,both", {"executor": {"epoch": 4}}, "", "executor.1 has not come"),
        ("both,decode", {"executor": {"epoch": 4}}, "", ""),
        ("decode,prefill", {"executor": {"epoch": 4}}, "executor.1 has not come", ""),
        ("decode,decode", {}, "no replica has the role prefill", ""),
    ],
)
def test_a_role_needs_one_replica(
    roles: str, changed: dict[str, Any], prefill: str, decode: str
) -> None:
    reports = [*lane(fairness={"load": {"roles": roles}}), *replica(1, **changed)]
    lanes = lanes_of(reports)
    for role, why in (("prefill", prefill), ("decode", decode)):
        found = role_trouble(lanes, role)
        start = f"{role} pool not ready: lane 0: {why}" if why else ""
        assert found.startswith(start)
        assert bool(found) == bool(why)


def test_a_role_without_lanes_is_not_ready() -> None:
    assert role_trouble([], "decode").startswith("decode pool not ready: no stage is running")


def test_one_lane_is_enough() -> None:
    found = lanes_of([*lane("a")[1:], *lane("b")])
    assert [each.ready for each in found] == [False, True]
    assert verdict(found) == ""


def test_every_lane_has_its_reason() -> None:
    found = lanes_of([*lane("a")[1:], *lane("b")[:4]])
    assert verdict(found) == (
        "lane a: no process runs admission; lane b: no process runs streaming"
    )


def test_a_successor_replaces_a_killed_process() -> None:
    killed = report("executor", age_s=4.0, pid=1)
    (found,) = lanes_of([*lane(executor={"state": "starting", "pid": 2}), killed])
    assert found.stages["executor"].pid == 2
    assert not found.ready
    assert found.rivals == ()


@pytest.mark.parametrize("state", ["running", "unknown"])
def test_a_process_that_is_late_for_its_heartbeat_is_only_busy(state: str) -> None:
    (found,) = lanes_of(lane(executor={"process_state": state, "age_s": 4.9}))
    assert found.ready


def test_a_successor_counts_before_an_ended_process() -> None:
    killed = report("executor", pid=1, process_state="gone")
    (found,) = lanes_of([*lane(executor={"age_s": 0.4, "pid": 2}), killed])
    assert found.stages["executor"].pid == 2
    assert found.ready
    assert found.rivals == ()


def test_two_at_the_same_time_are_rivals() -> None:
    (found,) = lanes_of([*lane(), report("executor", age_s=0.9, pid=2)])
    assert found.rivals == ("executor",)


@both_buses()
async def test_stages_report_their_state_and_load(make_config: MakeConfig) -> None:
    async with Pipeline(make_config()) as pipeline:
        await pipeline.complete({"prompt": "12 + 30 =", "sampling": {"temperature": 0}})
        (found,) = lanes_of(pipeline.stages())
        assert found.ready, found.reason
        loads = {stage: set(report.load) for stage, report in found.stages.items()}
        loads["batching"].discard("step_age_s")  # until it has heard of the end
        # From when the time of the request has been accounted for.
        loads["streaming"] = {each for each in loads["streaming"] if not each.startswith("time_")}
        assert all({"inbox", "received"} <= load for load in loads.values())
        loads = {stage: load - {"inbox", "received"} for stage, load in loads.items()}
        assert loads == {
            "admission": {"in_flight", "busy_s", "recovering", "model"},
            "fairness": {
                *("queued", "credits", "paused", "settings", "roles", "tenants"),
                *("preemptions", "yields", "resumes", "handovers"),
            },
            "batching": {
                *("running", "waiting", "set_aside"),
                *("kv_free", "kv_total", "kv_cached", "kv_pinned"),
            },
            "executor": {
                *("plans", "steps", "device", "weight_version", "max_model_len"),
                "deterministic",
                # Of recurrent layers, and of codes.
                *(fact for fact in FACTS if fact not in ("state_bytes", "quantization")),
            },
            "streaming": {
                *("open", "tokens_per_s", "token_age_s", "ttft_ms_p50", "ttft_ms_p95"),
                *("accounts_since_ns", "busy_ns", "billed_ns"),
            },
        }
        assert found.stages["executor"].load["steps"] > 0  # type: ignore[operator]
        assert [each.stage for each in await pipeline.bus.store.board.read()] == sorted(STAGES)


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_waiting_stages_report_their_reason(make_config: MakeConfig) -> None:
    some: tuple[Stage, ...] = ("admission", "batching")
    async with Pipeline(make_config(pipeline__stages=some)) as pipeline:
        reasons: dict[str, str] = {}
        while "has not sent" not in reasons.get("batching", ""):
            await pipeline.bus.ping()
            reasons = {report.stage: report.reason for report in pipeline.stages()}
        # Without the executor batching does not know what fits.
        assert reasons["admission"] == "fairness, batching, executor, streaming not ready"
        heart = Heart(make_config(), pipeline.bus, {})
        assert {report.state for report in heart.reports()} == {"starting"}


# --- supervision -----------------------------------------------------------------------------


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
    causes: list[str] = []
    with capture_logs() as lines, pytest.raises(StageFailed):
        await supervise(
            lambda: Broken(context),
            PipelineConfig(max_restarts=4, restart_backoff_s=0.0),
            causes.append,
        )
    failures = [line for line in lines if line["event"] == "stage_failed"]
    assert [line["error"] for line in failures] == [
        f"RuntimeError('{way}')" for way in ("a", "a", "a", "b", "b")
    ]
    assert [bool(line["exc_info"]) for line in failures] == [True, False, False, True, False]
    assert causes == [line["error"] for line in failures[:4]]
    await bus.aclose()


class Unreadable(Broken):
    """Can't read its model's files in some of its starts, and fails when it can."""

    readable: ClassVar[list[bool]]

    async def open(self) -> None:
        if not self.readable.pop(0):
            raise ModelError("there are no descriptors left")

    async def receive_forever(self, inbox: Inbox) -> None:
        raise RuntimeError("it has no connection")


@pytest.mark.parametrize(
    ("readable", "expected"), [([True, False], StageFailed), ([False], ModelError)]
)
async def test_a_stage_that_has_run_is_restarted_though_its_model_is_unreadable(
    readable: list[bool], expected: type[Exception]
) -> None:
    """A ModelError would end `up`, as at the first start."""
    Unreadable.readable = readable
    bus = MemoryBus(Config().bus)
    context = StageContext(Config(), bus, Tracing(None))
    with pytest.raises(expected):
        await supervise(
            lambda: Unreadable(context), PipelineConfig(max_restarts=1, restart_backoff_s=0.0)
        )
    assert not Unreadable.readable
    await bus.aclose()


class Counting(Broken):
    """Takes one message, and hangs at it."""

    async def open(self) -> None: ...

    async def handle(self, envelope: Envelope) -> None:
        await asyncio.sleep(3600)


async def test_a_stage_reports_its_inbox_and_its_received_messages() -> None:
    bus = MemoryBus(Config().bus)
    stage = Counting(StageContext(Config(), bus, Tracing(None)))
    assert stage.traffic() == {}, "it has no inbox yet"
    running = asyncio.create_task(stage.run())
    async with asyncio.timeout(30):
        while not stage.traffic():  # noqa: ASYNC110
            await asyncio.sleep(0)
    for number in range(70):  # one batch of 64 is taken at once
        sender = bus.sender(HALTS, "streaming-1" if number else "client-1")
        await sender.send(StopSequences((str(number),)))
    async with asyncio.timeout(30):
        while not stage.traffic()["received"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    found = stage.traffic()
    assert found["received"] == "client=1"
    assert found["inbox"] in range(6, 70)
    running.cancel()
    await asyncio.wait([running])
    await bus.aclose()


# --- cancellations ---------------------------------------------------------------------------


async def test_a_cancelled_caller_cancels_no_other() -> None:
    go = asyncio.Event()
    looks = SharedCall(go.wait)
    impatient, patient = (asyncio.create_task(looks.result()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await patient is True
    assert impatient.cancelled()


async def test_a_cancellation_that_takes_long_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellations, "CANCEL_PATIENCE_S", 0.01)
    bus = open_bus(BusConfig())
    client = BusClient(bus)
    go, cancelled = asyncio.Event(), []

    async def cancel(request_id: str, entry_id: str = "") -> None:
        await go.wait()
        cancelled.append((request_id, entry_id))

    monkeypatch.setattr(client, "cancel", cancel)
    async with aclosing(client.submit({"prompt": "x", "request_id": "mine"})) as outputs:
        asking = asyncio.ensure_future(anext(outputs))
        (entry,) = await bus.requests.take(1)
        asking.cancel()
        await asyncio.wait([asking])
    assert not cancelled
    go.set()
    await client.aclose()
    assert cancelled == [("mine", entry.entry_id)]
    await bus.aclose()


async def test_a_caller_cancelled_while_publishing_cancels_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellations, "CANCEL_PATIENCE_S", 0.01)
    bus = open_bus(BusConfig())
    client = BusClient(bus)
    begun, go, cancelled = asyncio.Event(), asyncio.Event(), []

    async def publish(request: object, trace: object = None) -> str:
        begun.set()
        await go.wait()
        return "7-0"

    async def cancel(request_id: str, entry_id: str = "") -> None:
        cancelled.append((request_id, entry_id))

    monkeypatch.setattr(client, "publish", publish)
    monkeypatch.setattr(client, "cancel", cancel)
    asking = asyncio.ensure_future(client.complete({"prompt": "x"}))
    await begun.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert not cancelled
    go.set()
    await client.aclose()
    assert cancelled == [("7-0", "7-0")]
    await bus.aclose()

"""The contract of links: order, bounds, cancelling, reopening."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, get_args

import msgspec
import pytest

from nano_inference.bus import Bus, Inbox, control, messages, recovery, steps, weights
from nano_inference.bus.control import SampleScored, ScoreSample
from nano_inference.bus.envelope import Message
from nano_inference.bus.links import ADMITTED, CONTROL, CREDITS, DISPATCH, FINISHED, PLANS
from nano_inference.bus.memory.bus import MemoryInbox
from nano_inference.bus.parts.handover import HandoverRoute
from nano_inference.bus.parts.responses import ResponseCaching
from nano_inference.bus.parts.sessions import SessionGrant, SessionTurn
from nano_inference.bus.parts.speculation import DraftsResult, VerifiedDraft
from nano_inference.bus.parts.tiers import TiersPlan
from nano_inference.bus.pooling import Pooling
from nano_inference.bus.public import KVSession, StageTime
from nano_inference.bus.times import StepTimes
from nano_inference.config import ChannelClosed, FairnessConfig, ModelConfig, SamplingParams
from nano_inference.store.loaded_adapter import LoadedAdapter

from ..buses import KINDS, kit

# Those of "redis-links" are those of "redis", once they are taken (test_bus.py).
BUSES = [kind for kind in KINDS if kind != "redis-links"]

SAMPLING = SamplingParams(
    temperature=0.7, max_tokens=9, stop_token_ids=frozenset({1, 2}), seed=-3, stop=("\n\n", "é")
)
IDS = ("r", "1-0", "00-a-b-01", "k=v")
QUEUED = StageTime(stage="fairness", start_ns=1, end_ns=2)
INFO = messages.RequestInfo(*IDS, "adapter", Pooling("mean", True, 4), QUEUED)
SPEC = messages.SequenceSpec(7, 1, -5, (8, 9))
PROMPT = messages.Prompt((1, 2, 3), ("image",))
GRANT = SessionGrant("pin", 3, 16, True, "no room")
NEW = steps.NewSequence(7, (1, 2), 0, 0, (4, 5), SAMPLING, SPEC, INFO, onward=(GRANT,))
STARTED = steps.StartedSequence(7, 1, "r", "1-0", 0, 0, 6, QUEUED, parts=(GRANT,))
TURN = KVSession(id="agent", ttl_s=9.5, after="demote")
RESPONSE = messages.StoredResponse(
    (messages.StoredSample((4, 5), (-0.5, -float("inf")), (((4, -0.5),), ()), "stop"),), 3, 2, 1
)
REMOTE = messages.RemoteBlocks("here", "layout", "weights", 3, 2, ((b"a" * 16, 4, 1),))
MOVE = steps.KVMove("drop", b"b")
DRAFT = VerifiedDraft(7, "prompt", 3, 2)
ITEMS = (recovery.RecoveryItem("r", "1-0", "r"), recovery.RecoveryItem("1-1", "1-1", ""))
CANCEL = control.Cancel("r", "1-0", "expired", "deadline", "too late", unstarted=True)
FOLDER, TENSOR = weights.FolderWeights("/weights/7"), weights.TensorMeta("w", "bfloat16", (2, 3))
MODEL = ModelConfig(id="a", path="/a", settings={"engine.max_batch_size": 4})
OPENED = ("r", "1-0", "tiny", 1, True, (), (1, 2))
SAMPLES: tuple[Message, ...] = (
    messages.AdmittedRequest(INFO, PROMPT, SAMPLING, (SPEC,), "default", -1, rank=4),
    messages.AdmittedRequest(
        INFO, PROMPT, SAMPLING, (SPEC,), "default", 0, parts=(SessionTurn(TURN),)
    ),
    messages.AdmittedRequest(
        *(INFO, PROMPT, SAMPLING, (SPEC,), "default", 0), parts=(HandoverRoute((1,), REMOTE),)
    ),
    messages.AnnounceSequence(messages.AdmittedRequest(INFO, PROMPT, SAMPLING, (SPEC,), "", 0)),
    messages.AnnounceBlocks(7, ((b"n" * 16, 3, 1),)),
    messages.Handover(7, (4,), 1, 5),
    messages.WithdrawSequences((7,)),
    messages.ReleaseBlocks((7, 8)),
    messages.PauseSequences((1, 2)),
    messages.ResumeSequences((7, 8), -5),
    messages.Credit(3, ((7, 8), (8,)), ((9, 12),), (7,), (8,), 1_000_000, 640),
    steps.StepPlan(1, (NEW,), (7,), (2,), ((7, (6,)),), ((1, 2),), (3,), (CANCEL,), 99),
    steps.StepPlan(
        *(2, (), (), (), (), (), (), (), 99),
        parts=(TiersPlan((steps.KVMove("store", b"a" * 16, 3, 4, True), MOVE)), StepTimes(1, 2)),
    ),
    steps.StepResult(1, (STARTED,), (7,), (42,), (-0.25,), ("stop",), (CANCEL,), 3, 10, 20),
    steps.StepSummary(1, (7,), (42,), (7,), 10, 20, (DraftsResult((DRAFT,), 4),)),
    messages.RequestOpened("r", "1-0", "tiny", 2, True, ("x",), (1, 2, 3), *IDS[2:], 1 << 62),
    ScoreSample("r", "1-0", 1, (1, 2, 3), 2, 0.5),
    SampleScored("r", "1-0", 1, (-0.25,)),
    recovery.Recover(ITEMS, 1),
    recovery.Recovered("1-0", (recovery.RecoveredSample(1, (4, 5), True),)),
    recovery.Retracted("1-0", (0, 2)),
    messages.RequestFinished("r", "1-0"),
    messages.RequestFinished("r", "1-0", RESPONSE),
    messages.RequestOpened(
        "r", "1-0", "tiny", 1, True, (), (1, 2), parts=(ResponseCaching(1 << 49),)
    ),
    messages.RequestOpened(
        "r", "1-0", "tiny", 1, True, (), (1, 2), parts=(ResponseCaching(0, RESPONSE),)
    ),
    recovery.Fenced(("1-0", "1-1")),
    CANCEL,
    control.StopSequences((1,)),
    control.Pause(),
    control.Resume(),
    control.CancelAll(),
    control.UpdateWeights(FOLDER, "retract", 7, True, 9.5),
    control.UpdateWeights(weights.SharedMemoryWeights(("a", "b"), (TENSOR,), ((1, 64),))),
    control.UpdateWeights(weights.GroupWeights("g", (TENSOR,), 1 << 20, 3)),
    control.UpdateWeights(weights.LocalWeights("here")),
    control.UpdateWeights(weights.StagedWeights("step-7", 2), part_of="step-8"),
    control.UpdateWeights(FOLDER, prepare_as="op-6"),
    control.FinishUpdate("op-6", 7),
    control.ChecksumWeights(),
    control.WeightsReady(8, "abort"),
    control.JoinWeightsGroup("g", "127.0.0.1:1", 1, 2, "gloo", 3.5),
    control.LeaveWeightsGroup("g"),
    control.MoveExperts((0, 1, 1, 0)),
    control.TellWeightVersion(),
    control.ReleaseMemory(("kv_cache",)),
    control.ResumeMemory(("weights",)),
    control.MemoryState(("weights", "kv_cache"), ("kv_cache",)),
    control.FlushCache(),
    control.ControlSession("default", "agent", "prefetch", 2.5),
    control.Drain(5),
    control.UpdateFairness(FairnessConfig(aging_s=3.5)),
    control.UpdateRoles(("prefill", "both")),
    control.LoadAdapter("sql", "/adapters/sql", version=3),
    control.UnloadAdapter("sql"),
    control.AdapterReady("sql", 3, "retract"),
    control.AdaptersChanged("executor-1a", (LoadedAdapter("sql", 3),)),
    control.WeightsChanged("executor.1", 7),
    control.LoadModel("a"),
    control.LoadModel("a", MODEL),
    control.UnloadModel("a", 2.5, True),
    control.Reset(),
    control.StageStarted("executor", "executor-1a"),
    control.StageReady("executor", "executor-1a", control.ReplicaCapacity(10, 16, 128, 300, "cpu")),
    control.TiersChanged((b"a" * 16,), (), (b"b" * 16,), True),
    control.TiersChanged(audited=(control.AuditedBlock(b"a" * 16, "one", "other"),)),
    control.StageStopped("executor", "executor-1a", "SIGTERM"),
    control.StageStopped("executor", "executor-1a", "RuntimeError()", True),
    control.ServerRestarted(),
)


async def receive_for_ever(inbox: Inbox) -> None:
    while True:
        await inbox.receive()


async def test_every_message_arrives_equal(bus: Bus) -> None:
    assert {type(sample) for sample in SAMPLES} == set(get_args(Message))
    inbox = await bus.open_inbox("batching")
    sender = bus.sender(CONTROL["batching"], "admission-1")
    for sample in SAMPLES:
        await sender.send(sample)
    received = await kit.bodies(inbox, len(SAMPLES))
    assert list(map(with_decoded_sections, received, SAMPLES)) == list(SAMPLES)


def with_decoded_sections(received: Any, sent: Any) -> Any:
    decoded: dict[str, Any] = {}
    for name in ("parts", "onward"):
        if sections := getattr(sent, name, ()):
            found = getattr(received, name)
            decoded[name] = tuple(type(section).find(found) for section in sections)
    for name in ("new", "started"):
        if isinstance(sent, steps.StepPlan | steps.StepResult) and (
            inner := getattr(sent, name, ())
        ):
            decoded[name] = tuple(map(with_decoded_sections, getattr(received, name), inner))
    return msgspec.structs.replace(received, **decoded)


async def test_envelope_is_filled_in(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(ADMITTED, "admission-1")
    trace = {"traceparent": "00-x", "tracestate": "a=b"}
    await sender.send(control.Pause(), epoch=4, budget_ns=-5, operation_id="op-1", **trace)
    await sender.send(control.Pause())
    first, second = await kit.receive(inbox, 2)
    assert (first.epoch, first.sender, first.id) == (4, "admission-1", 1)
    assert (first.traceparent, first.tracestate, first.budget_ns) == ("00-x", "a=b", -5)
    assert (first.operation_id, second.operation_id) == ("op-1", "")
    assert (second.epoch, second.id, second.budget_ns) == (0, 2, None)
    assert second.sent_ns >= first.sent_ns > 0


async def test_order_of_each_sender(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    senders = [bus.sender(CREDITS, f"batching-{i}") for i in range(3)]
    await asyncio.gather(*(kit.send_all(sender, range(200)) for sender in senders))
    received = await kit.receive(inbox, 600)
    for i in range(3):
        own = [e.body.sequences for e in received if e.sender == f"batching-{i}"]
        assert own == list(range(200))


async def test_second_sender_object_goes_on_counting(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    await bus.sender(CREDITS, "batching-1").send(kit.credit(1))
    await bus.sender(CREDITS, "batching-1").send(kit.credit(2))
    assert [e.id for e in await kit.receive(inbox, 2)] == [1, 2]


async def test_links_of_one_stage_share_an_inbox(bus: Bus) -> None:
    inbox = await bus.open_inbox("batching")
    await bus.sender(DISPATCH, "fairness-1").send(kit.credit(1))
    await bus.sender(CONTROL["batching"], "client-1").send(kit.credit(2))
    assert {body.sequences for body in await kit.bodies(inbox, 2)} == {1, 2}


async def test_receive_takes_at_most_max_items(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    await kit.send_all(bus.sender(CREDITS, "batching-1"), range(10))
    first = (await kit.receive(inbox, 1))[0].body.sequences
    assert len(await inbox.receive(3)) <= 3
    assert first == 0


async def test_full_link_makes_its_sender_wait(buses: Any) -> None:
    bus = buses.open(link_capacity=8)
    inbox = await bus.open_inbox("executor")
    sender = bus.sender(PLANS, "batching-1")
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(400):
            await sender.send(kit.credit(number))
            sent += 1

    sending = asyncio.create_task(send())
    waiting = await kit.settled(lambda: sent)
    assert 8 <= waiting < 100
    assert not sending.done()
    assert [b.sequences for b in await kit.bodies(inbox, 400)] == list(range(400))
    await sending


async def test_full_link_does_not_hold_up_others(buses: Any) -> None:
    bus = buses.open(link_capacity=4)
    inbox = await bus.open_inbox("batching")
    full = asyncio.create_task(kit.send_all(bus.sender(DISPATCH, "fairness-1"), range(100)))
    await kit.send_all(bus.sender(CONTROL["batching"], "admission-1"), range(1000, 1050))
    numbers = [body.sequences for body in await kit.bodies(inbox, 150)]
    assert [n for n in numbers if n < 1000] == list(range(100))
    assert [n for n in numbers if n >= 1000] == list(range(1000, 1050))
    await full


async def test_link_that_closes_a_circle_never_blocks(buses: Any) -> None:
    bus = buses.open(link_capacity=4)
    inbox = await bus.open_inbox("admission")
    sender = bus.sender(FINISHED, "streaming-1")
    await kit.send_all(sender, range(500))
    await sender.flush()
    assert [b.sequences for b in await kit.bodies(inbox, 500)] == list(range(500))


async def test_clients_have_a_bounded_share_of_a_control_link(memory_bus: Any) -> None:
    inbox = await memory_bus.open_inbox("admission")
    flood = memory_bus.sender(CONTROL["admission"], "client-1")
    sent: list[int] = []

    async def send() -> None:
        for number in range(1500):
            await flood.send(kit.credit(number))
            sent.append(number)

    flooding = asyncio.create_task(send())
    assert await kit.settled(lambda: len(sent)) == 1024
    await memory_bus.sender(CONTROL["admission"], "streaming-1").send(kit.credit(-1))
    numbers = [body.sequences for body in await kit.bodies(inbox, 1501)]
    assert sorted(numbers) == list(range(-1, 1500))
    await flooding


async def test_cancelled_receive_loses_nothing(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(CREDITS, "batching-1")
    received: list[int] = []
    for number in range(60):
        receiving = asyncio.create_task(inbox.receive())
        await asyncio.sleep(0)
        await sender.send(kit.credit(number))
        if number % 3:
            await asyncio.sleep(0)
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            received += [e.body.sequences for e in await receiving]
    received += [b.sequences for b in await kit.bodies(inbox, 60 - len(received))]
    assert received == list(range(60))


async def test_cancelled_send_is_whole_or_nothing(buses: Any) -> None:
    bus = buses.open(link_capacity=2)
    inbox = await bus.open_inbox("executor")
    sender = bus.sender(PLANS, "batching-1")
    confirmed: list[int] = []

    async def send(number: int) -> None:
        await sender.send(kit.credit(number))
        confirmed.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(100)]
    await kit.settled(lambda: len(confirmed))
    for number, task in enumerate(tasks):
        if number % 2:
            task.cancel()
    received: list[int] = []
    while 98 not in received:
        received += [body.sequences for body in await kit.bodies(inbox, 1)]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert received == sorted(set(received))
    assert set(confirmed) <= set(received)
    assert set(range(0, 100, 2)) <= set(received)


async def test_an_inbox_receives_messages_sent_after_its_opening(bus: Bus) -> None:
    sender = bus.sender(ADMITTED, "admission-1")
    await sender.send(kit.credit(1))
    await sender.flush()
    inbox = await bus.open_inbox("fairness")
    await sender.send(kit.credit(2))
    assert [b.sequences for b in await kit.bodies(inbox, 1)] == [2]


async def test_reopened_inbox_is_empty_and_closes_the_old_one(bus: Bus) -> None:
    old = await bus.open_inbox("fairness")
    sender = bus.sender(ADMITTED, "admission-1")
    await sender.send(kit.credit(1))
    await sender.flush()
    new = await bus.open_inbox("fairness")
    await sender.send(kit.credit(2))
    assert [b.sequences for b in await kit.bodies(new, 1)] == [2]
    with pytest.raises(ChannelClosed):
        await receive_for_ever(old)


async def test_reopening_wakes_the_old_receiver(bus: Bus) -> None:
    old = await bus.open_inbox("fairness")
    receiving = asyncio.create_task(old.receive())
    await asyncio.sleep(0)
    await bus.open_inbox("fairness")
    with pytest.raises(ChannelClosed):
        await receiving


async def test_waiting_sender_goes_on_with_the_reopened_inbox(buses: Any) -> None:
    bus = buses.open(link_capacity=4)
    await bus.open_inbox("executor")
    sender = bus.sender(PLANS, "batching-1")
    sending = asyncio.create_task(kit.send_all(sender, range(100)))
    await kit.settled(lambda: int(sending.done()))
    assert not sending.done()
    inbox = await bus.open_inbox("executor")
    numbers: list[int] = []
    while not numbers or numbers[-1] != 99:
        numbers += [body.sequences for body in await kit.bodies(inbox, 1)]
    assert numbers == list(range(numbers[0], 100))
    await sending


async def test_a_closed_inbox_delivers_the_rest(memory_bus: Bus) -> None:
    inbox = await memory_bus.open_inbox("fairness")
    sender = memory_bus.sender(ADMITTED, "admission-1")
    await kit.send_all(sender, range(3))
    assert isinstance(inbox, MemoryInbox)
    inbox.close()
    assert len(await kit.receive(inbox, 3)) == 3
    with pytest.raises(ChannelClosed):
        await inbox.receive()
    with pytest.raises(ChannelClosed):
        await sender.send(kit.credit(4))
    again = await memory_bus.open_inbox("fairness")
    await sender.send(kit.credit(5))
    assert [b.sequences for b in await kit.bodies(again, 1)] == [5]

"""A part that is defined here alone: what a new optional feature has to write."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from nano_inference.bus.control import Internal, ReplicaCapacity
from nano_inference.bus.messages import AdmittedRequest
from nano_inference.bus.sections import Section
from nano_inference.bus.steps import StepPlan, StepSummary
from nano_inference.config import EngineConfig
from nano_inference.stages.batching import BatchingCore, Sequence
from nano_inference.stages.batching.core import UnknownMessage
from nano_inference.stages.batching.parts import PARTS, Core, Entry, Part
from nano_inference.stages.batching.plans import PlanDraft, SentPlan

from ..replica import FakeReplica, expected


class TenantPreemptions(Section, frozen=True):
    """In StepPlan: preemptions since the plan before, by tenant."""

    numbers: tuple[tuple[str, int], ...]


class ForgetTenant(Internal, frozen=True):
    """To batching: count a tenant's preemptions from 0."""

    tenant: str


class Preemptions(Part):
    """Counts preemptions by tenant."""

    handles = (ForgetTenant,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self.total: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def receive(self, message: ForgetTenant, now_ns: int, deadline_ns: int | None) -> int:
        return self.total.pop(message.tenant, 0)

    def accept(self, request: AdmittedRequest, deadline_ns: int | None) -> bool:
        self.calls["accept"] += 1
        return request.tenant != "refused"

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        self.calls["admit"] += 1
        seq.extras["tenant"] = request.tenant

    def start(self, seq: Sequence, new: dict[str, Any]) -> None:
        self.calls["start"] += 1

    def end(self, seq: Sequence) -> None:
        self.calls["end"] += 1

    def leave(self, seq: Sequence) -> None:
        assert not seq.block_ids, "its blocks are free"
        self.calls["leave"] += 1

    def begin(self, now_ns: int) -> None:
        self.calls["begin"] += 1

    def planned(self, draft: PlanDraft) -> None:
        self.calls["planned"] += 1
        preempted = [seq_id for seq_id, why in draft.left if why == "preemption"]
        index = self.core.index
        numbers = Counter(index[seq_id].extras["tenant"] for seq_id in preempted)
        if numbers:
            self.total += numbers
            draft.parts.append(TenantPreemptions(tuple(sorted(numbers.items()))))

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        self.calls["absorb"] += 1
        return ()

    def lose(self) -> None:
        self.calls["lose"] += 1

    def reset(self) -> None:
        self.calls["reset"] += 1

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        total, self.total = self.total, Counter()
        return {"preemptions": total}


ENTRY = Entry(Preemptions, configured=lambda config, capacity: True)


def replica_with(*entries: Entry) -> FakeReplica:
    replica = FakeReplica(num_blocks=10)
    config = EngineConfig(max_tokens_per_batch=32)
    replica.core = BatchingCore(config, replica.capacity, parts=(*PARTS, *entries))
    return replica


def test_a_part_of_one_file_receives_each_hook_and_sends_its_section() -> None:
    replica = replica_with(ENTRY)
    part = replica.core.part(Preemptions)
    for seq_id, tenant in enumerate(("a", "b", "b")):
        replica.add([seq_id] * 9, seq_id, tenant=tenant, max_tokens=12)
    replica.add([9], 9, tenant="refused")
    replica.run()
    assert {seq_id: replica.outputs[seq_id] for seq_id in range(3)} == {
        seq_id: expected([seq_id] * 9, 12) for seq_id in range(3)
    }
    assert 9 not in replica.outputs
    sent = Counter[str]()
    for plan in replica.log:
        if (section := TenantPreemptions.find(on_the_wire(plan).parts)) is not None:
            sent.update(dict(section.numbers))
    assert sent.total() == replica.core.take_counters().preemptions > 0
    assert replica.core.receive(ForgetTenant("a"), 0) == sent["a"]
    assert replica.core.take_counts() == {"preemptions": {"b": sent["b"]}}
    replica.lose_plans()
    replica.core.clear()
    assert part.calls["accept"] == 4
    assert part.calls["admit"] == part.calls["end"] == part.calls["leave"] == 3
    assert part.calls["start"] == 3 + sent.total()
    assert part.calls["planned"] == part.calls["absorb"] == len(replica.log) < part.calls["begin"]
    assert (part.calls["lose"], part.calls["reset"]) == (2, 1)


def on_the_wire(plan: StepPlan) -> StepPlan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)


def test_a_message_makes_the_part_that_it_needs() -> None:
    replica = replica_with(Entry(Preemptions, messages=("ForgetTenant",)))
    assert replica.core.find(Preemptions) is None
    assert replica.core.receive(ForgetTenant("a"), 0) == 0
    assert replica.core.find(Preemptions) is not None


def test_a_message_that_no_part_handles_is_refused() -> None:
    with pytest.raises(UnknownMessage):
        replica_with().core.receive(ForgetTenant("a"), 0)


def test_each_part_of_the_list_can_be_loaded() -> None:
    assert all(issubclass(entry.load(), Part) for entry in PARTS)


UNCONFIGURED = """
import sys
from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching.core import BatchingCore

core = BatchingCore(EngineConfig(), ReplicaCapacity(64, 16, 512, 99, "none"))
info, specs = RequestInfo("r", "1-0"), (SequenceSpec(0, 0, 0),)
core.add(AdmittedRequest(info, Prompt((1, 2)), SamplingParams(), specs, "", 0))
plan = core.plan(0)
assert plan is not None
folder = "nano_inference.stages.batching.parts."
print(*sorted(name.removeprefix(folder) for name in sys.modules if name.startswith(folder)))
"""


def test_without_settings_no_optional_part_is_imported() -> None:
    command = [sys.executable, "-c", UNCONFIGURED]
    assert subprocess.check_output(command, text=True).split() == ["accounts"]


def test_a_plain_decode_step_has_no_sections() -> None:
    replica = FakeReplica()
    replica.add([1, 2], 0)
    replica.run()
    first, *others = replica.log
    assert first.parts
    assert others
    assert not any(plan.parts or plan.onward for plan in others)

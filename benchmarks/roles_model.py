"""Replicas with roles in virtual time, for `roles.py`: the stages' cores, devices by a formula."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from harness import percentile

from nano_inference.bus.control import ReplicaCapacity, TierCapacity, TiersChanged
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    Prompt,
    ReleaseBlocks,
    RequestInfo,
    SequenceSpec,
)
from nano_inference.bus.parts.handover import HandoversResult, first_tokens, leaving_of
from nano_inference.bus.parts.tiers import moves_of
from nano_inference.bus.steps import KVMove, NewSequence, StepPlan, StepResult
from nano_inference.config import EngineConfig, FairnessConfig, ReplicaRole, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.batching.parts.handover.departures import Departure, Departures
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.parts.handovers import Handovers

SECOND = 1_000_000_000
POLL_NS = 1_000_000


@dataclass(frozen=True)
class Device:
    """Costs of a step and of moving KV.

    The defaults are assumptions, near a model with 7 billion parameters (the shape of Qwen2.5-7B)
    in bfloat16 on an H200: weights of 15.2 GB read at 80 % of 4.3 TB/s, prompts at 60 % of 780
    TFLOP/s, 50 GB/s between device and host, 10 GB/s between hosts, 0.5 ms for a message.
    """

    step_ns: int = 4_400_000
    prefill_token_ns: int = 32_000
    decode_row_ns: int = 20_000
    token_bytes: int = 57_344
    copy_bytes_per_s: float = 50e9
    transfer_bytes_per_s: float = 10e9
    message_ns: int = 500_000
    block_size: int = 16
    num_blocks: int = 16_384

    def copy_ns(self, blocks: int) -> int:
        """Return the time to copy blocks between device and host."""
        return int(blocks * self.block_size * self.token_bytes / self.copy_bytes_per_s * SECOND)

    def transfer_ns(self, blocks: int) -> int:
        """Return the time to read blocks of another host."""
        size = blocks * self.block_size * self.token_bytes
        return int(size / self.transfer_bytes_per_s * SECOND)

    def step_cost_ns(self, plan: StepPlan) -> int:
        """Return the time of a step, with the copies before and after it."""
        moved = moves_of(plan.parts)
        copied = sum(move.kind != "fetch" and move.block_id >= 0 for move in moved)
        prefill = sum(number for number in plan.num_tokens if number > 1)
        rows = sum(number == 1 for number in plan.num_tokens)
        step_ns = self.step_ns if plan.seq_ids else 0
        tokens_ns = prefill * self.prefill_token_ns + rows * self.decode_row_ns
        return step_ns + tokens_ns + self.copy_ns(copied)


@dataclass
class Stream:
    """A request, and when each of its tokens was computed, in nanoseconds."""

    sent_ns: int
    at_ns: list[int] = field(default_factory=list)


class Replica:
    """A batching core and its device, which executes plans one after the other."""

    def __init__(self, name: str, lane: SimulatedLane, tokens_per_step: int) -> None:
        device = lane.device
        config = EngineConfig(max_tokens_per_batch=tokens_per_step, block_size=device.block_size)
        # The tiers' costs decide whether loading pays; here it does.
        tiers = TierCapacity(
            *(device.num_blocks, 0, "layout", "weights", 0, ""),
            *(device.copy_ns(1), device.transfer_ns(1), device.prefill_token_ns),
            address=name,
        )
        size = (device.num_blocks, device.block_size, 1 << 20, 1 << 30)
        capacity = ReplicaCapacity(*size, "formula", max_batch_size=64, parts=(tiers,))
        self.name = name
        self.step_id = 0
        self.core = BatchingCore(config, capacity)
        self._lane = lane
        self._plans: deque[StepPlan] = deque()
        self._busy = False
        self._left: dict[int, int] = {}
        self._to_make: dict[int, int] = {}
        self._link_free_ns = 0

    def pump(self) -> None:
        """Plan ahead, report to fairness, and let the device begin its next plan."""
        lane = self._lane
        while (plan := self.core.plan(lane.now_ns)) is not None:
            self._plans.append(plan)
        if (departures := self.core.find(Departures)) is not None:
            for departure in departures.take_departures():
                lane.pass_on(departure)
        if (report := self.core.take_report()) is not None:
            lane.send(lambda: lane.fairness.absorb(report, lane.now_ns, self.name))
        if self._plans and not self._busy:
            self._busy = True
            plan = self._plans.popleft()
            self._fetch([move for move in moves_of(plan.parts) if move.kind == "fetch"])
            end_ns = lane.now_ns + lane.device.step_cost_ns(plan)
            lane.at(end_ns, lambda: self._done(plan))

    def _fetch(self, moves: list[KVMove]) -> None:
        """Read blocks of the other replica, after those that are being read, once their step is
        done."""
        lane = self._lane
        steps = [move.step for move in moves]
        if moves and lane.step_of(moves[0].source) < max(steps):
            lane.at(lane.now_ns + POLL_NS, lambda: self._fetch(moves))
        elif moves:
            begin_ns = max(lane.now_ns, self._link_free_ns)
            self._link_free_ns = begin_ns + lane.device.transfer_ns(len(moves))
            change = TiersChanged(fetched=tuple(move.name for move in moves))
            lane.at(self._link_free_ns, lambda: self._came(change))

    def _came(self, change: TiersChanged) -> None:
        self.core.receive(change, 0)
        self.pump()

    def _done(self, plan: StepPlan) -> None:
        self._busy = False
        self.step_id = plan.step_id
        result = self._execute(plan)
        summary = result.summary(*HandoversResult.of(leaving_of(plan.parts), result))
        for each in first_tokens(plan, summary):
            self._lane.pass_on(Departure(*each))
        self.core.absorb(summary)
        self.pump()

    def _start(self, new: NewSequence) -> None:
        self._left[new.seq_id] = len(new.token_ids) - new.num_cached
        self._to_make[new.seq_id] = new.sampling.max_tokens - new.num_generated

    def _execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self._start(new)
        sampled: list[int] = []
        reasons: list[Any] = []
        for seq_id, number in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if self._to_make.get(seq_id, 0) <= 0:
                continue  # it has ended, or was handed over
            self._left[seq_id] -= number
            if self._left[seq_id]:
                continue
            self._left[seq_id] = 1
            self._to_make[seq_id] -= 1
            self._lane.streams[seq_id].at_ns.append(self._lane.now_ns)
            sampled.append(seq_id)
            reasons.append("" if self._to_make[seq_id] else "length")
        for seq_id in plan.finished:
            self._to_make.pop(seq_id, None)
        zeros = (0,) * len(sampled)
        now_ns = self._lane.now_ns
        return StepResult(
            *(plan.step_id, (), tuple(sampled), zeros, zeros, tuple(reasons), plan.ended),
            weight_version=0,
            start_ns=now_ns,
            end_ns=now_ns,
        )


class SimulatedLane:
    """Fairness and two replicas; messages between them take `Device.message_ns`.

    Attributes:
        now_ns: The virtual time.
        streams: By sequence.
    """

    def __init__(
        self, device: Device, roles: tuple[ReplicaRole, ...], tokens_per_step: int
    ) -> None:
        self.device = device
        self.now_ns = 0
        self.streams: dict[int, Stream] = {}
        self.fairness = FairnessCore(FairnessConfig(), replicas=2, roles=roles)
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()
        names = ("batching", "batching.1")
        self._replicas = {name: Replica(name, self, tokens_per_step) for name in names}
        for replica in self._replicas.values():
            self.fairness.absorb(Credit(replica.core.limits.max_batch_size), 0, replica.name)

    def at(self, at_ns: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._order), event))

    def send(self, event: Callable[[], object]) -> None:
        """Let fairness apply a message, once it has come."""
        self.at(self.now_ns + self.device.message_ns, lambda: (event(), self._dispatch()))

    def pass_on(self, departure: Departure) -> None:
        """Let another replica apply a message, once it has come."""
        replica = [*self._replicas.values()][departure.successor]
        arrival = self.now_ns + self.device.message_ns
        self.at(arrival, lambda: (replica.core.receive(departure.message, 0), replica.pump()))

    def step_of(self, name: str) -> int:
        """Return the last step of a replica."""
        return self._replicas[name].step_id

    def submit(self, seq_id: int, at_ns: int, prompt: int, output: int) -> None:
        self.streams[seq_id] = Stream(at_ns)
        first = seq_id << 20
        about = RequestInfo(str(seq_id), str(seq_id)), Prompt(tuple(range(first, first + prompt)))
        sampling = SamplingParams(max_tokens=output)
        request = AdmittedRequest(*about, sampling, (SequenceSpec(seq_id, 0, 0),), "tenant", 0)
        self.at(at_ns, lambda: (self.fairness.push(request, self.now_ns), self._dispatch()))

    def run(self, until_ns: int) -> None:
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, event = heapq.heappop(self._events)
            event()

    def _dispatch(self) -> None:
        while (dispatched := self.fairness.pop(self.now_ns)) is not None:
            replica, message = self._replicas[dispatched.replica], dispatched.message
            assert isinstance(message, AdmittedRequest), "nothing is paused here"
            arrival = self.now_ns + self.device.message_ns
            self.at(arrival, lambda r=replica, m=message: (r.core.add(m), r.pump()))
        for name, seq_ids in self.fairness.part(Handovers).take_releases().items():
            replica = self._replicas[name]
            self.at(
                self.now_ns + self.device.message_ns,
                lambda r=replica, s=seq_ids: r.core.receive(ReleaseBlocks(tuple(s)), 0),
            )


def interference(
    device: Device,
    roles: tuple[ReplicaRole, ...],
    tokens_per_step: int,
    *,
    streams: int,
    length: int,
    every_s: float,
    seconds: float,
) -> dict[str, float]:
    """Return the time between tokens of running streams beside long prompts, in milliseconds, and
    the prompts' time to first token."""
    lane = SimulatedLane(device, roles, tokens_per_step)
    for number in range(streams):
        lane.submit(number, 0, 64, 1 << 19)
    began_ns, end_ns = SECOND, int((1 + seconds) * SECOND)
    arrivals = [began_ns + int(n * every_s * SECOND) for n in range(int(seconds / every_s))]
    for number, at_ns in enumerate(arrivals, streams):
        lane.submit(number, at_ns, length, 32)
    lane.run(end_ns)
    gaps = [
        (after - before) / 1e6
        for number in range(streams)
        for before, after in pairwise(lane.streams[number].at_ns)
        if after > began_ns
    ]
    firsts = [
        (stream.at_ns[0] - stream.sent_ns) / 1e6
        for number, stream in lane.streams.items()
        if number >= streams and stream.at_ns
    ]
    made = sum(at > began_ns for stream in lane.streams.values() for at in stream.at_ns)
    return {
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "itl_most": max(gaps),
        "first_p50": percentile(firsts, 0.5),
        "first_p99": percentile(firsts, 0.99),
        "tokens_per_s": made / seconds,
    }

"""A pipeline without a model: the cores of fairness and batching with a device that is a formula.

Time is simulated, so that any machine can simulate thousands of requests per second; decisions are
made by the code of the stages.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    Prompt,
    RequestInfo,
    ResumeSequences,
    SequenceSpec,
)
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import EngineConfig, FairnessConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.fairness import Counts, Dispatched, FairnessCore, Running

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Arrival:
    """A request of a trace, with lengths in tokens; requests of a `group` have the first `shared`
    tokens of their prompts in common."""

    at_ns: int
    tenant: str
    prompt: int
    output: int
    priority: int = 0
    group: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Device:
    """Costs of a step. The defaults are near a small model on a data centre's GPU."""

    step_ns: int = 1_500_000
    prefill_token_ns: int = 2_000
    decode_row_ns: int = 3_000
    num_blocks: int = 32_768
    max_batch_size: int = 512
    max_tokens_per_batch: int = 4096

    def cost_ns(self, num_tokens: Iterable[int]) -> int:
        """Return the cost of a step, given the tokens of each row."""
        prefill = rows = 0
        for number in num_tokens:
            if number > 1:
                prefill += number
            else:
                rows += 1
        return self.step_ns + prefill * self.prefill_token_ns + rows * self.decode_row_ns


class FixedOrder:
    """The peers' queue: its order is fixed on arrival, without tenants, slices or preemption."""

    def __init__(self, rank: Callable[[AdmittedRequest, int], int]) -> None:
        self.counts = Counts()
        self._rank = rank
        self._heap: list[tuple[int, int, AdmittedRequest]] = []
        self._order = count()
        self._credits = 0

    def push(self, request: AdmittedRequest, now_ns: int) -> None:
        heapq.heappush(self._heap, (self._rank(request, now_ns), next(self._order), request))

    def absorb(self, report: Credit, now_ns: int) -> list[Running]:
        self._credits += report.sequences
        return []

    def pop(self, now_ns: int) -> Dispatched | None:
        if not self._credits or not self._heap:
            return None
        self._credits -= 1
        rank, _, request = heapq.heappop(self._heap)
        message = replace(request, rank=rank)
        return Dispatched(
            replica="",
            message=message,
            request=request,
            arrived_ns=0,
            deadline_ns=None,
            resumed=None,
            last=True,
            passed_by=(0, 0, 0),
        )

    def ask_to_pause(self, now_ns: int) -> list[Running]:
        return []


Queue = FixedOrder | FairnessCore

POLICIES: dict[str, tuple[Callable[[FairnessConfig], Queue], bool]] = {
    # First come, first served.
    "FCFS": (lambda config: FixedOrder(lambda request, now_ns: now_ns), True),
    # The priority flag of other engines, with ageing against starvation.
    "priority": (
        lambda config: FixedOrder(
            lambda request, now_ns: now_ns - request.priority * int(config.aging_s * 1e9)
        ),
        False,
    ),
    # Virtual token counters alone.
    "VTC": (
        lambda config: FairnessCore(
            FairnessConfig(tenant_weights=config.tenant_weights, tenant_timeslice_tokens=0)
        ),
        True,
    ),
    "ours": (FairnessCore, False),
}
"""By name: a function that makes the queue, and whether the policy has no priorities."""


@dataclass
class Record:
    """Times of a request; 0 until they are known."""

    arrival: Arrival
    first_token_ns: int = 0
    finished_ns: int = 0

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.arrival.at_ns


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        prompt_tokens, output_tokens: Served tokens, cached ones included.
        computed_tokens: Tokens that the device computed.
        recomputed_tokens: Tokens computed again after preemption, which `computed_tokens` includes.
        service: Samples of (time, weighted service by tenant).
        waiting: Samples of (time, queued requests by tenant).
    """

    name: str
    records: list[Record] = field(default_factory=list)
    steps: int = 0
    end_ns: int = 0
    busy_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    yields: int = 0
    service: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    waiting: list[tuple[int, dict[str, int]]] = field(default_factory=list)


class Simulation:
    """Requests, a queue, the batching core and a device."""

    def __init__(
        self,
        policy: str,
        config: FairnessConfig,
        device: Device,
        *,
        keep_records: bool = True,
        sample_every_ns: int = SECOND // 4,
    ) -> None:
        """Args:
        policy: Its name in `POLICIES`.
        keep_records: Keep the records of finished requests.
        """
        engine = EngineConfig(max_tokens_per_batch=device.max_tokens_per_batch)
        size = (device.num_blocks, engine.block_size, 1 << 20, 1 << 30)
        capacity = ReplicaCapacity(*size, "formula", max_batch_size=device.max_batch_size)
        self.batching = BatchingCore(engine, capacity, steps_ahead=1)
        make, self._flat = POLICIES[policy]
        self.queue = make(config)
        self.now_ns = 0
        self.outcome = Outcome(policy)
        self.service: dict[str, float] = defaultdict(float)
        self.num_waiting: dict[str, int] = defaultdict(int)
        self._device = device
        self._prices = config.prefill_weight, config.decode_weight
        self._weights = config.tenant_weights
        self._keep_records = keep_records
        self._sample_every_ns = sample_every_ns
        self._next_sample_ns = 0
        self._records: dict[int, Record] = {}
        self._left: dict[int, int] = {}
        self._to_make: dict[int, int] = {}
        self._started: set[int] = set()
        self._ids = count(1)
        self.queue.absorb(Credit(device.max_batch_size), 0)

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Run a load to its end."""
        coming = deque(sorted(arrivals, key=lambda each: each.at_ns))
        while True:
            while coming and coming[0].at_ns <= self.now_ns:
                self.submit(coming.popleft())
            if not self.step():
                if not coming:
                    break
                self.now_ns = max(self.now_ns, coming[0].at_ns)
        self.outcome.end_ns = self.now_ns
        self.outcome.preemptions = self.queue.counts.preemptions
        self.outcome.yields = self.queue.counts.yields
        return self.outcome

    def submit(self, arrival: Arrival) -> None:
        """Queue a request."""
        number = next(self._ids)
        # The tokens after the shared ones are unique.
        own = range(number << 20, (number << 20) + arrival.prompt - arrival.shared)
        shared = range(-(arrival.group + 1) << 20, (-(arrival.group + 1) << 20) + arrival.shared)
        prompt = Prompt((*shared, *own))
        name = str(number)
        request = AdmittedRequest(
            *(RequestInfo(name, name), prompt, SamplingParams(max_tokens=arrival.output)),
            *((SequenceSpec(number, 0, 0),), arrival.tenant),
            0 if self._flat else arrival.priority,
        )
        record = self._records[number] = Record(arrival)
        if self._keep_records:
            self.outcome.records.append(record)
        self.num_waiting[arrival.tenant] += 1
        self.queue.push(request, self.now_ns)

    def step(self) -> bool:
        """Run one step of the device, with the decisions before and after it."""
        self._dispatch()
        plan = self.batching.plan(self.now_ns)
        if plan is None:
            return False
        cost_ns = self._device.cost_ns(plan.num_tokens)
        start_ns, self.now_ns = self.now_ns, self.now_ns + cost_ns
        self.outcome.steps += 1
        self.outcome.busy_ns += cost_ns
        self.batching.absorb(self._execute(plan, start_ns).summary())
        if (report := self.batching.take_report()) is not None:
            self.queue.absorb(report, self.now_ns)
        if self.now_ns >= self._next_sample_ns:
            self._next_sample_ns = self.now_ns + self._sample_every_ns
            self.outcome.service.append((self.now_ns, dict(self.service)))
            self.outcome.waiting.append((self.now_ns, dict(self.num_waiting)))
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while (dispatched := self.queue.pop(self.now_ns)) is not None:
            message = dispatched.message
            if isinstance(message, ResumeSequences):
                self.batching.resume_sequences(message.seq_ids, message.rank)
                continue
            self.batching.add(message)
            record = self._records[message.sequences[0].seq_id]
            tenant = record.arrival.tenant
            self.num_waiting[tenant] -= 1
            # As in the theorem: a prompt counts on dispatch, tokens when they are generated.
            self._serve(tenant, self._prices[0] * record.arrival.prompt)
            self.outcome.prompt_tokens += record.arrival.prompt
        if asked := self.queue.ask_to_pause(self.now_ns):
            self.batching.pause_sequences(running.spec.seq_id for running in asked)
            if (report := self.batching.take_report()) is not None:
                self.queue.absorb(report, self.now_ns)
                self._dispatch()

    def _serve(self, tenant: str, cost: float) -> None:
        self.service[tenant] += cost / self._weights.get(tenant, 1.0)

    def _execute(self, plan: StepPlan, start_ns: int) -> StepResult:
        left, to_make, outcome = self._left, self._to_make, self.outcome
        for new in plan.new:
            left[new.seq_id] = len(new.token_ids) - new.num_cached
            if new.seq_id in self._started:
                outcome.recomputed_tokens += left[new.seq_id] - 1
            else:
                self._started.add(new.seq_id)
                to_make[new.seq_id] = new.sampling.max_tokens
        sampled: list[int] = []
        reasons: list[Any] = []
        made: dict[str, int] = defaultdict(int)
        for seq_id, number in zip(plan.seq_ids, plan.num_tokens, strict=True):
            outcome.computed_tokens += number
            rest = left[seq_id] - number
            if rest:
                left[seq_id] = rest
                continue
            left[seq_id] = 1
            to_make[seq_id] -= 1
            record = self._records[seq_id]
            record.first_token_ns = record.first_token_ns or self.now_ns
            made[record.arrival.tenant] += 1
            sampled.append(seq_id)
            reasons.append("" if to_make[seq_id] else "length")
            if not to_make[seq_id]:
                record.finished_ns = self.now_ns
                del left[seq_id], to_make[seq_id], self._records[seq_id]
                self._started.discard(seq_id)
        for tenant, number in made.items():
            self._serve(tenant, self._prices[1] * number)
        outcome.output_tokens += len(sampled)
        zeros = (0,) * len(sampled)
        return StepResult(
            *(plan.step_id, (), tuple(sampled), zeros, zeros, tuple(reasons), plan.ended),
            weight_version=0,
            start_ns=start_ns,
            end_ns=self.now_ns,
        )


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the arrivals of a file: CSV with a header, or one JSON object a line.

    Columns are arrival (seconds), tenant, prompt and output (tokens), and optionally priority.

    Raises:
        ValueError: A line has another form; the message names it.
    """
    with path.open(newline="") as lines:
        is_csv = path.suffix == ".csv"
        rows: Iterable[Any] = csv.DictReader(lines) if is_csv else map(json.loads, lines)
        for number, row in enumerate(rows, start=2 if is_csv else 1):
            try:
                yield Arrival(
                    at_ns=int(float(row["arrival"]) * SECOND),
                    tenant=str(row["tenant"]),
                    prompt=max(1, int(row["prompt"])),
                    output=max(1, int(row["output"])),
                    priority=int(row.get("priority") or 0),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from None


def jain(shares: Iterable[float]) -> float:
    """Return Jain's index of fairness: 1 if all shares are equal, 1/n if one has everything."""
    values = list(shares)
    total = sum(values)
    return total * total / (len(values) * sum(each * each for each in values)) if total else 1.0

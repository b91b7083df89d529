"""Cost of a decision of the fairness core, by the number of queued requests.

    python benchmarks/fairness_cost.py [--rounds K] [--json FILE]

Fills the queue with requests of many tenants (three priorities, as many deadlines as requests) and
runs a batch. `decision` is one `pop`, from a free place to the message for it. `request` is all
fairness work for one request: it is made and pushed, nine tokens are counted, a running request
ends, and the next is dispatched. Microseconds, medians of the rounds, with the default settings and
with all features; `x` is the ratio to the smallest queue. The peer is a heap of as many entries,
pushed and popped: the cost of an order that never changes.
"""

from __future__ import annotations

import heapq
import statistics
import time
from itertools import count
from typing import Any

from harness import Table, options, write

from nano_inference.bus.messages import AdmittedRequest, Credit, Prompt, RequestInfo, SequenceSpec
from nano_inference.config import FairnessConfig, SamplingParams
from nano_inference.stages.fairness import Dispatched, FairnessCore

SIZES = ((100, 10), (1_000, 10), (1_000, 100), (10_000, 100), (10_000, 1_000), (100_000, 10_000))
"""Queued requests, and tenants."""

BATCH = 256
PER_ROUND = 200
FAR_NS = 10**18
EVERYTHING = FairnessConfig(
    enable_preemption=True, max_timeslice_tokens=64, locality_tokens=4096, deadline_order=True
)
SAMPLING = SamplingParams(max_tokens=64)
PROMPT = Prompt(tuple(range(256)))


class Load:
    """A queue of constant length, and a running batch."""

    def __init__(self, requests: int, tenants: int, config: FairnessConfig) -> None:
        self.core = FairnessCore(config)
        self._ids = count(1)
        self._tenants = tenants
        self.now_ns = 0
        self.decision_ns = 0
        self.running: list[int] = []
        self.core.absorb(Credit(BATCH, kv_free=1 << 20), 0)
        for _ in range(requests + BATCH):
            self.push()
        self.dispatch()

    def push(self) -> None:
        number = next(self._ids)
        name = str(number)
        info = RequestInfo(name, name)
        specs = (SequenceSpec(number, 0, 0),)
        tenant = f"tenant-{number % self._tenants}"
        request = AdmittedRequest(info, PROMPT, SAMPLING, specs, tenant, number % 3)
        self.now_ns += 1000
        self.core.push(request, self.now_ns, FAR_NS + number)

    def dispatch(self) -> None:
        while (dispatched := self._timed_pop()) is not None:
            assert isinstance(dispatched.message, AdmittedRequest)
            self.running += [spec.seq_id for spec in dispatched.message.sequences]

    def _timed_pop(self) -> Dispatched | None:
        started = time.perf_counter_ns()
        dispatched = self.core.pop(self.now_ns)
        if dispatched is not None:
            self.decision_ns += time.perf_counter_ns() - started
        return dispatched

    def turn(self) -> None:
        """Add one request, and end one."""
        self.push()
        ended = self.running.pop(0)
        step = (ended, *self.running[:8])
        report = Credit(
            1, (step,), ((ended, len(PROMPT.token_ids)),), ended=(ended,), kv_free=1 << 20
        )
        self.core.absorb(report, self.now_ns)
        self.dispatch()
        self.core.ask_to_pause(self.now_ns)
        self.core.expire(self.now_ns)


def microseconds(
    requests: int, tenants: int, config: FairnessConfig, rounds: int
) -> tuple[float, float]:
    """Return the microseconds of a decision, and of all work for a request."""
    load = Load(requests, tenants, config)
    decisions, turns = [], []
    for _ in range(rounds):
        load.decision_ns = 0
        started = time.perf_counter_ns()
        for _ in range(PER_ROUND):
            load.turn()
        turns.append((time.perf_counter_ns() - started) / PER_ROUND / 1000)
        decisions.append(load.decision_ns / PER_ROUND / 1000)
    assert load.core.num_queued == requests
    return statistics.median(decisions), statistics.median(turns)


def heap_microseconds(requests: int, rounds: int) -> float:
    heap = [(number, object()) for number in range(requests)]
    times, number = [], requests
    for _ in range(rounds):
        started = time.perf_counter_ns()
        for _ in range(PER_ROUND):
            number += 1
            heapq.heappush(heap, (number, object()))
            heapq.heappop(heap)
        times.append((time.perf_counter_ns() - started) / PER_ROUND / 1000)
    return statistics.median(times)


COLUMNS = {
    "tenants": "{tenants:,}",
    "decision, default": "{default[decision]:.1f}",
    "x": "{default[x_least]:.2f}",
    "request": "{default[request]:.1f}",
    "decision, everything": "{everything[decision]:.1f}",
    "x ": "{everything[x_least]:.2f}",
    "request ": "{everything[request]:.1f}",
    "bare heap, µs": "{heap:.2f}",
}


def main() -> None:
    arguments = options(__doc__, rounds=15).parse_args()
    rows: list[dict[str, Any]] = []
    least: dict[str, float] = {}
    table = Table(COLUMNS, "queued", 8)
    for requests, tenants in SIZES:
        row: dict[str, Any] = {"requests": requests, "tenants": tenants}
        for name, config in (("default", FairnessConfig()), ("everything", EVERYTHING)):
            decision, turn = microseconds(requests, tenants, config, arguments.rounds)
            ratio = decision / least.setdefault(name, decision)
            row[name] = {"decision": decision, "x_least": ratio, "request": turn}
        row["heap"] = heap_microseconds(requests, arguments.rounds)
        rows.append(row)
        table.row(f"{requests:,}", row)
    write(arguments.json, rows)


if __name__ == "__main__":
    main()

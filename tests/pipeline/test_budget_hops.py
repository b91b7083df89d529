"""One budget through every hop: each hop subtracts the time for which it held the request.

Each process has a clock of its own here, hours apart from the others, which advances by hours while
its process holds the request. So each hop's share differs from the test's own time, and from the
other hops' shares.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from nano_inference import Gateway, GenerateRequest, Pipeline
from nano_inference.bus import RequestEntry
from nano_inference.bus.envelope import Envelope
from nano_inference.bus.memory.bus import MemoryRequests
from nano_inference.bus.messages import AdmittedRequest
from nano_inference.bus.redis.requests import RedisRequests
from nano_inference.bus.steps import StepPlan, StepSummary
from nano_inference.gateway.api.kserve.service import InferenceService
from nano_inference.gateway.call import Call
from nano_inference.gateway.serving.submissions import Submissions
from nano_inference.kserve import InferRequest, KServeClient, NamedTensor, text_tensor
from nano_inference.kserve.parameters import TIMEOUT_NS_PARAM
from nano_inference.pipeline.client import BusClient
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.stages.fairness.core import FairnessCore
from nano_inference.stages.fairness.stage import FairnessStage
from nano_inference.telemetry import now_ns

from .conftest import LIMIT_S, MakeConfig, both_buses

HOUR_NS = 3600 * 10**9

# How many hours each hop holds the request; each sum of some of them is another one.
HELD = {
    "client": 1,
    "gateway": 2,
    "queue": 4,
    "admission": 8,
    "fairness": 16,
    "batching": 32,
    "executor": 64,
}
BUDGET_NS = (sum(HELD.values()) + 1) * HOUR_NS

# They are not those of the budget: no hop may look at another's clock.
AHEAD = {"client": 7, "gateway": 70, "admission": 700, "fairness": 7000, "batching": 70_000}
CLOCKS = {
    "client": ("kserve.client.monotonic_ns",),
    "gateway": (
        "gateway.server.http.now_ns",
        "gateway.call.now_ns",
        "gateway.api.kserve.service.now_ns",
    ),
    "admission": ("stages.admission.stage.now_ns", "stages.admission.judging.now_ns"),
    "fairness": ("stages.fairness.stage.now_ns",),
    "batching": ("stages.batching.stage.now_ns",),
}


class Clock:
    """A process's; it starts where no other's is."""

    def __init__(self, ahead_hours: int) -> None:
        self._ahead_ns = ahead_hours * HOUR_NS

    def __call__(self) -> int:
        return now_ns() + self._ahead_ns

    def hold(self, hours: int) -> None:
        """So much time passes for this process."""
        self._ahead_ns += hours * HOUR_NS


class Followed:
    """A budget that is followed.

    Attributes:
        left: (place, nanoseconds left on arrival), in order.
        clocks: Of the processes that look at theirs.
        patch: Undoes all changes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[tuple[str, int | None]] = []
        self.clocks = {name: Clock(hours) for name, hours in AHEAD.items()}
        self.patch = monkeypatch
        for name, places in CLOCKS.items():
            for place in places:
                monkeypatch.setattr(f"nano_inference.{place}", self.clocks[name])

    def came(self, where: str, left_ns: int | None) -> None:
        """Notes it, once for each place."""
        if where not in dict(self.left):
            self.left.append((where, left_ns))

    def behind(self, owner: type, method: str, do: Callable[..., None]) -> None:
        """Has something done behind each call of a method, with its arguments but the first."""
        self._wrap(owner, method, do, before=False)

    def before(self, owner: type, method: str, do: Callable[..., None]) -> None:
        """The same before it."""
        self._wrap(owner, method, do, before=True)

    def _wrap(self, owner: type, method: str, do: Callable[..., None], before: bool) -> None:
        original = getattr(owner, method)

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                do(*args)
                return original(self, *args, **kwargs)
            result = original(self, *args, **kwargs)
            do(*args)
            return result

        self.patch.setattr(owner, method, wrapper)

    def check(self, *held: str) -> None:
        """Check that each hop has subtracted its own holding time."""
        assert len(self.left) == len(held) + 1, self.left
        for (_, before), (where, after), hop in zip(self.left, self.left[1:], held, strict=False):
            assert before is not None, hop
            assert after is not None, f"{where} has no budget"
            taken_ns = before - after
            assert 0 <= taken_ns - HELD[hop] * HOUR_NS < LIMIT_S * 10**9, hop

    def holds(self, where: str, clock: str = "") -> Callable[..., None]:
        """What holds the request somewhere when it is called the first time."""
        hours = [HELD[where]]

        def hold(*args: Any) -> None:
            self.clocks[clock or where].hold(hours.pop() if hours else 0)

        return hold


def follow_the_front(followed: Followed) -> None:
    """The client and the gateway."""

    def arrived(call: Call, request: InferRequest, *rest: Any) -> None:
        left_ns = request.parameters[TIMEOUT_NS_PARAM]
        assert isinstance(left_ns, int)
        followed.came("gateway", left_ns)

    followed.before(InferenceService, "infer", arrived)
    # From here on the deadline is the call's.
    followed.before(Submissions, "run", followed.holds("gateway"))
    # The client encodes the tensors for that long.
    followed.before(KServeClient, "_is_shared", followed.holds("client"))


def follow_the_queue(followed: Followed) -> None:
    """Follow the published and the taken request; the bus reports the hours in the queue."""

    def published(request: Any, *rest: Any) -> None:
        followed.came("queue", msgspec.convert(request, GenerateRequest).budget_ns)

    def waited(take: Callable[..., Any]) -> Callable[..., Any]:
        async def taken(self: Any, *args: Any) -> list[RequestEntry]:
            entries = [aged(entry) for entry in await take(self, *args)]
            for entry in entries:
                followed.came("admission", (entry.budget_ns or 0) - entry.waited_ns)
            return entries

        return taken

    followed.before(BusClient, "publish", published)
    for owner in (MemoryRequests, RedisRequests):
        followed.patch.setattr(owner, "take", waited(owner.take))


def aged(entry: RequestEntry) -> RequestEntry:
    waited_ns = entry.waited_ns + HELD["queue"] * HOUR_NS
    return msgspec.structs.replace(entry, waited_ns=waited_ns)


def follow_the_stages(followed: Followed) -> None:
    """Admission, fairness, batching and the executor."""
    clocks = followed.clocks

    def arrived(kind: type, where: str) -> Callable[[Envelope], None]:
        def note(envelope: Envelope) -> None:
            if isinstance(envelope.body, kind):
                followed.came(where, envelope.budget_ns)

        return note

    holds = followed.holds
    followed.behind(AdmissionCore, "admit", holds("admission"))
    followed.before(FairnessStage, "handle", arrived(AdmittedRequest, "fairness"))
    followed.behind(FairnessCore, "push", holds("fairness"))
    followed.before(BatchingStage, "handle", arrived(AdmittedRequest, "batching"))

    deadlines: list[int | None] = []

    def left_ns() -> int | None:
        (deadline_ns,) = deadlines
        return None if deadline_ns is None else deadline_ns - clocks["batching"]()

    hold_batching, hold_executor = holds("batching"), holds("executor", "batching")

    def added(dispatch: AdmittedRequest, deadline_ns: int | None) -> None:
        deadlines.append(deadline_ns)
        hold_batching()

    def planned(envelope: Envelope) -> None:
        if isinstance(envelope.body, StepPlan) and envelope.body.seq_ids:
            followed.came("executor", left_ns())
            hold_executor()

    def computed(envelope: Envelope) -> None:
        if isinstance(envelope.body, StepSummary) and envelope.body.seq_ids:
            followed.came("the result", left_ns())

    followed.behind(BatchingCore, "add", added)
    followed.before(ExecutorStage, "handle", planned)
    followed.before(BatchingStage, "handle", computed)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    found = Followed(monkeypatch)
    follow_the_front(found)
    follow_the_queue(found)
    follow_the_stages(found)
    return found


@asynccontextmanager
async def opened(make_config: MakeConfig) -> AsyncIterator[KServeClient]:
    """A client of a gateway in front of a pipeline."""
    # The lane's lease is not over when admission's clock goes forward.
    config = make_config(admission__lease_s=86_400, gateway__grpc_port=0)
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        KServeClient(f"127.0.0.1:{gateway.grpc_port}") as client,
    ):
        yield client


def asked() -> list[NamedTensor]:
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return [
        NamedTensor("input_ids", np.array([1, 2, 3, 4])),
        text_tensor("sampling_parameters", json.dumps(sampling)),
    ]


@both_buses("redis-links")
async def test_each_hop_subtracts_its_holding_time(
    make_config: MakeConfig, followed: Followed
) -> None:
    followed.came("client", BUDGET_NS)
    async with opened(make_config) as client:
        answer = await client.infer("tiny.tokens", asked(), budget_ns=BUDGET_NS)
    assert answer.output("output_ids").shape == (1, 8)
    followed.check(*HELD)

"""One budget on its way through every hop: each sends on what it got, less what it held it for.

Each process has a clock of its own here, which is hours from the others', and goes forward by hours
while its process holds the request. So what a hop takes off can be told from the time that the test
itself takes, and from what another hop takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nano_inference import Completion, GenerateRequest, Pipeline
from nano_inference.bus import RequestEntry
from nano_inference.bus.memory.bus import MemoryRequests
from nano_inference.bus.messages import AdmittedRequest, Dispatch, Envelope, StepPlan, StepResult
from nano_inference.bus.redis.requests import RedisRequests
from nano_inference.pipeline.client import BusClient
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.stages.fairness.core import FairnessCore
from nano_inference.stages.fairness.stage import FairnessStage
from nano_inference.telemetry import now_ns

from .conftest import MakeConfig, both_buses

LIMIT_S = 60
HOUR_NS = 3600 * 10**9

# How many hours each hop holds the request; each sum of some of them is another one.
HELD = {"queue": 1, "admission": 2, "fairness": 4, "batching": 8, "executor": 16}
BUDGET_NS = (sum(HELD.values()) + 1) * HOUR_NS

# They are not those of the budget: no hop may look at another's clock.
AHEAD = {"admission": 700, "fairness": 70, "batching": 7000}
CLOCKS = {
    "admission": ("admission.stage", "admission.judging"),
    "fairness": ("fairness.stage",),
    "batching": ("batching.stage",),
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
        left: (where, what was left of it in nanoseconds when it came there), in order.
        clocks: Of the processes that look at theirs.
        patch: Undoes what is changed here.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[tuple[str, int | None]] = []
        self.clocks = {name: Clock(hours) for name, hours in AHEAD.items()}
        self.patch = monkeypatch
        for name, modules in CLOCKS.items():
            for module in modules:
                target = f"nano_inference.stages.{module}.now_ns"
                monkeypatch.setattr(target, self.clocks[name])

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
        """Each hop has taken off what it held the request for, and not what others did."""
        assert len(self.left) == len(held) + 1, self.left
        for (_, before), (where, after), hop in zip(self.left, self.left[1:], held, strict=False):
            assert before is not None, hop
            assert after is not None, f"{where} knows no budget"
            taken_ns = before - after
            assert 0 <= taken_ns - HELD[hop] * HOUR_NS < LIMIT_S * 10**9, hop


def follow_the_queue(followed: Followed) -> None:
    """What is published and what admission takes. The hour in the queue is told by the bus."""

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

    def holds(where: str, clock: str = "") -> Callable[..., None]:
        """The first time."""
        hours = [HELD[where]]

        def hold(*args: Any) -> None:
            clocks[clock or where].hold(hours.pop() if hours else 0)

        return hold

    followed.behind(AdmissionCore, "admit", holds("admission"))
    followed.before(FairnessStage, "handle", arrived(AdmittedRequest, "fairness"))
    followed.behind(FairnessCore, "push", holds("fairness"))
    followed.before(BatchingStage, "handle", arrived(Dispatch, "batching"))

    deadlines: list[int | None] = []

    def left_ns() -> int | None:
        (deadline_ns,) = deadlines
        return None if deadline_ns is None else deadline_ns - clocks["batching"]()

    hold_batching, hold_executor = holds("batching"), holds("executor", "batching")

    def added(dispatch: Dispatch, deadline_ns: int | None) -> None:
        deadlines.append(deadline_ns)
        hold_batching()

    def planned(envelope: Envelope) -> None:
        if isinstance(envelope.body, StepPlan) and envelope.body.seq_ids:
            followed.came("executor", left_ns())
            hold_executor()

    def computed(envelope: Envelope) -> None:
        if isinstance(envelope.body, StepResult) and envelope.body.seq_ids:
            followed.came("the result", left_ns())

    followed.behind(BatchingCore, "add", added)
    followed.before(ExecutorStage, "handle", planned)
    followed.before(BatchingStage, "handle", computed)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    found = Followed(monkeypatch)
    follow_the_queue(found)
    follow_the_stages(found)
    return found


async def answer(make_config: MakeConfig, budget_ns: int) -> Completion:
    # Its lease is not over when admission's clock goes forward.
    config = make_config(admission__lease_s=86_400)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        request = {"prompt": "12 + 30 =", "sampling": sampling, "budget_ns": budget_ns}
        return await pipeline.complete(request)


@both_buses
async def test_each_stage_takes_off_what_it_held(
    make_config: MakeConfig, followed: Followed
) -> None:
    completion = await answer(make_config, BUDGET_NS)
    assert completion.status == "done", completion.error
    followed.check("queue", "admission", "fairness", "batching", "executor")
    assert followed.left[0] == ("queue", BUDGET_NS)


@pytest.mark.parametrize("last", HELD)
async def test_the_budget_ends_in_the_hop_that_holds_it_too_long(
    make_config: MakeConfig, followed: Followed, last: str
) -> None:
    """Wherever its last half hour is spent, none comes behind."""
    hops = list(HELD)[: list(HELD).index(last) + 1]
    held_ns = sum(HELD[hop] for hop in hops) * HOUR_NS
    completion = await answer(make_config, held_ns - HOUR_NS // 2)
    assert completion.status == "expired", completion.error
    assert sum(len(sample.token_ids) for sample in completion.samples) < 8
    lefts = [left_ns or 0 for _, left_ns in followed.left]
    assert min(lefts[: len(hops)]) > 0
    assert max(lefts[len(hops) :], default=-1) < 0, "if it came further at all, then too late"
    followed.check(*hops[: len(lefts) - 1])

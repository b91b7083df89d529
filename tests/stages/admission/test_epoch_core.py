"""Effects of single events on the epochs; the simulation has them in any order."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nano_inference.bus.control import (
    Cancel,
    CancelAll,
    Drain,
    Pause,
    ServerRestarted,
    StageReady,
    StageStarted,
    StageStopped,
)
from nano_inference.bus.entries import RequestEntry, id_in
from nano_inference.bus.messages import RequestFinished
from nano_inference.bus.public import ErrorInfo, GenerateRequest
from nano_inference.bus.recovery import Fenced, Recovered
from nano_inference.config import AdmissionConfig, Config, PipelineConfig
from nano_inference.stages.admission import effects as do
from nano_inference.stages.admission import stage
from nano_inference.stages.admission.arrivals import Arrival, Judged
from nano_inference.stages.admission.checks import request_id_of
from nano_inference.stages.admission.epochs import RECOVER_BATCH, EpochCore
from nano_inference.stages.admission.requests import entry_deadline_ns

from .made import CAPACITY, accepted

SECOND = 1_000_000_000
NONE_LOST: frozenset[str] = frozenset()


class Driven:
    """A core whose effects are done at once; those that reach others are kept."""

    def __init__(self, *pending: RequestEntry, replicas: int = 1) -> None:
        config = Config(
            admission=AdmissionConfig(lease_s=1.0, max_lane_deaths=2),
            pipeline=PipelineConfig(replicas=replicas),
        )
        self.core = EpochCore(config, "admission", "me")
        self.now = SECOND
        self.lost = NONE_LOST
        self.owner: str | None = None
        self.is_long = False
        self.failure: ErrorInfo | None = None
        self.done: list[do.Effect] = []
        self.judged: list[Judged] = []
        self.tell(partial(self.core.begin, pending))

    def tell(self, event: Any) -> None:
        for effect in self.core.handle(event, self.now):
            match effect:
                case do.Then(then):
                    self.tell(then)
                case do.BeginEpoch(reason):
                    self.tell(partial(self.core.open_epoch, self.core.epoch + 1, reason))
                case do.Renew():
                    self.renew(*self.lost)
                case do.Claim(entries):
                    owners, long = [self.owner] * len(entries), [self.is_long] * len(entries)
                    self.tell(partial(self.core.admit_inherited, entries, owners, long))
                case do.Judge():
                    self.judged.append(judged(effect, self.now, self.failure))
                    self.tell(partial(self.core.enter, self.judged[-1]))
                case do.Log():
                    pass
                case _:
                    self.done.append(effect)

    def ready(self, *roles: str, epoch: int = 0) -> None:
        """These take part, by default all."""
        for role in roles or self.core.participants.roles:
            capacity = CAPACITY if role.startswith("executor") else None
            ready = StageReady(role, "i", capacity)
            self.tell(partial(self.core.take_part, ready, epoch or self.core.epoch))

    def let_in(self, *entry_ids: str, budget_ns: int | None = None) -> None:
        for entry_id in entry_ids:
            self.core.requests.incoming.add([entry(entry_id)])
            self.arrive(entry_id, budget_ns)

    def arrive(self, entry_id: str, budget_ns: int | None = None) -> None:
        arrival = Arrival(entry(entry_id, budget_ns), self.now, None)
        self.tell(partial(self.core.arrive, arrival))

    def renew(self, *lost: str) -> None:
        """The leases are renewed; other lanes have these entries."""
        self.tell(partial(self.core.renewed, lost))

    def fail(self, *held: str) -> None:
        """The executor fails and comes back; streaming has nothing of what is held."""
        self.tell(StageStopped("executor", "i", "failed", failed=True))
        self.ready()
        for entry_id in held:
            self.tell(Recovered(entry_id, ()))

    def forwarded(self) -> list[str]:
        return [id_in(each.key) for each in self.done if isinstance(each, do.Forward)]

    def kinds(self) -> list[str]:
        return [type(each).__name__ for each in self.done]


def entry(entry_id: str, budget_ns: int | None = None) -> RequestEntry:
    return RequestEntry(entry_id, GenerateRequest(prompt="x", budget_ns=budget_ns))


def named(entry_id: str, request_id: str) -> RequestEntry:
    return RequestEntry(entry_id, GenerateRequest(prompt="x", request_id=request_id))


def judged(wanted: do.Judge, now_ns: int, failure: ErrorInfo | None = None) -> Judged:
    """Accept all entries but duplicates and those whose time is over; none with a failure."""
    arrival = wanted.arrival
    if failure is not None:
        return Judged(arrival, failure=failure)
    entry_id = arrival.entry.entry_id
    if wanted.owner not in (None, entry_id):
        return Judged(arrival, end=Cancel(entry_id, entry_id, "error", "duplicate_request", ""))
    deadline_ns = entry_deadline_ns(arrival.entry, arrival.received_ns)
    if deadline_ns is not None and deadline_ns <= now_ns:
        return Judged(arrival, end=Cancel(entry_id, entry_id, "expired", "expired", ""))
    ids = request_id_of(arrival.entry), entry_id
    return Judged(arrival, accepted(*ids), wanted.cancelled)


def test_recovery_requests_are_sent_in_small_groups() -> None:
    driven = Driven()
    driven.ready()
    ids = [f"{number}-0" for number in range(RECOVER_BATCH + 1)]
    driven.let_in(*ids)
    driven.tell(StageStarted("executor", "i"))
    driven.ready()
    asked = [each for each in driven.done if isinstance(each, do.Ask)]
    assert [len(each.items) for each in asked] == [RECOVER_BATCH, 1]
    assert [item.entry_id for each in asked for item in each.items] == ids
    assert [opened.entry_id for each in asked for opened in each.opened] == ids


def test_the_lane_opens_when_all_stages_take_part_in_this_epoch() -> None:
    driven = Driven()
    assert driven.core.participants.missing == ["fairness", "batching", "executor", "streaming"]
    driven.tell(StageStarted("executor", "i"))
    driven.ready(epoch=driven.core.epoch - 1)
    assert len(driven.core.participants.missing) == 4
    driven.ready("fairness", "batching", "executor")
    assert not driven.core.is_open
    driven.ready("streaming")
    assert driven.core.is_open
    assert driven.kinds()[-2:] == ["TakePart", "SetGate"]


def test_an_entry_of_another_lane_is_not_admitted() -> None:
    driven = Driven()
    driven.ready()
    driven.core.requests.incoming.add([entry("1"), entry("2")])
    driven.renew("1")
    driven.now += 2 * SECOND  # the lease may be over, so it is looked after first
    driven.lost = frozenset({"2"})
    for entry_id in ("1", "2"):
        driven.arrive(entry_id)
    assert not driven.forwarded()
    assert driven.core.requests.room() == AdmissionConfig().max_in_flight


def test_streaming_drops_requests_of_other_lanes_before_recovery() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2")
    driven.lost = frozenset({"1"})
    driven.done.clear()
    driven.fail("2")
    kinds = [kind for kind in driven.kinds() if kind in ("Forget", "Ask", "Forward")]
    assert kinds == ["Forget", "Ask", "Forward"]
    assert driven.forwarded() == ["2"]


def test_suspects_run_one_at_a_time_before_the_lane_opens() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2", "3")
    driven.done.clear()
    driven.fail("1", "2", "3")
    assert driven.forwarded() == ["1"]
    assert list(driven.core.alone) == ["2", "3"]
    driven.tell(RequestFinished("1", "1"))
    assert driven.forwarded() == ["1", "2"]
    assert not driven.core.is_open
    driven.tell(RequestFinished("2", "2"))
    assert driven.forwarded() == ["1", "2", "3"]
    assert driven.core.is_open


def test_the_lane_opens_when_another_lane_has_the_suspects() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2")
    driven.fail("1", "2")
    assert list(driven.core.alone) == ["2"]
    driven.renew("1", "2")
    assert driven.core.is_open


def test_inherited_entries_without_time_end_while_the_lane_is_down() -> None:
    """Each of them where its own answer is looked for: whose the id is must be known first."""
    for owner, code in ((None, "expired"), ("1", "expired"), ("another", "duplicate_request")):
        driven = Driven(entry("1", budget_ns=SECOND))
        driven.owner = owner
        driven.ready("streaming")
        assert driven.core.wake_at_ns() == 2 * SECOND
        driven.now += 2 * SECOND
        driven.tell(driven.core.tick)
        driven.tell(Recovered("1", ()))
        (end,) = [each.cancel for each in driven.done if isinstance(each, do.End)]
        assert (end.code, end.unstarted) == (code, True)


@pytest.mark.parametrize("streaming_is_there", [True, False])
def test_a_request_in_flight_expires_while_the_executor_is_missing(
    streaming_is_there: bool,
) -> None:
    """Streaming ends it with its tokens so far, as soon as it takes part."""
    driven = Driven()
    driven.ready()
    driven.let_in("1", budget_ns=SECOND)
    driven.tell(StageStopped("executor", "i", "stopped"))
    driven.done.clear()
    if streaming_is_there:
        driven.ready("streaming")
    assert driven.core.wake_at_ns() == 2 * SECOND
    driven.now = 2 * SECOND
    driven.tell(driven.core.tick)
    driven.ready("streaming")
    (asked,) = [each for each in driven.done if isinstance(each, do.Ask)]
    driven.tell(Recovered("1", ()))
    (end,) = [each.cancel for each in driven.done if isinstance(each, do.End)]
    assert ([item.entry_id for item in asked.items], end.status) == (["1"], "expired")


def test_a_fenced_stream_of_this_lane_begins_an_epoch() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2")
    before = driven.core.epoch
    driven.lost = frozenset({"1"})
    driven.tell(Fenced(("1",)))
    assert driven.core.epoch == before
    driven.lost = NONE_LOST
    driven.tell(Fenced(("2",)))
    assert driven.core.epoch == before + 1


def test_entries_are_marked_possibly_lost_before_leases_are_renewed() -> None:
    driven = Driven()
    driven.done.clear()
    driven.tell(ServerRestarted())
    assert driven.kinds()[0] == "MarkPossiblyLost"


def test_the_shell_performs_every_effect() -> None:
    performed = set(re.findall(r"case do\.(\w+)\(", Path(stage.__file__).read_text()))
    assert {each.__name__ for each in do.Effect.__subclasses__()} == performed


def test_two_requests_under_one_entry_id_are_two_requests() -> None:
    """After a failover a server gives the id of an entry that it has lost to another one."""
    driven = Driven()
    driven.ready()
    first, second = (named("1", name) for name in "ab")
    early = Cancel("b", "1", "cancelled", "cancelled", "")
    driven.tell(early)
    for each in (first, second):
        driven.core.requests.incoming.add([each])
        driven.tell(partial(driven.core.arrive, Arrival(each, driven.now, None)))
    (judged_first, judged_second) = driven.judged
    assert (judged_first.end, judged_second.end) == (None, early)
    assert [each.key for each in driven.core.requests.ledger] == ["1 a", "1 b"]
    driven.tell(RequestFinished("b", "1"))
    assert [each.key for each in driven.core.requests.ledger] == ["1 a"]
    driven.renew("1 b")
    assert [each.key for each in driven.core.requests.ledger] == ["1 a"]


@pytest.mark.parametrize("unusable", ["", "a\nb", "x" * 1000])
def test_a_request_without_a_usable_id_is_cancelled_by_its_entrys_id(unusable: str) -> None:
    driven = Driven()
    driven.ready()
    arriving = named("1", unusable)
    driven.core.requests.incoming.add([arriving])
    driven.tell(partial(driven.core.arrive, Arrival(arriving, driven.now, None)))
    driven.done.clear()
    driven.tell(Cancel(unusable, "1", "cancelled", "cancelled", ""))
    (cut,) = [each.cancel for each in driven.done if isinstance(each, do.CutShort)]
    assert (cut.request_id, cut.entry_id) == ("1", "1")


def test_only_a_failure_in_the_lane_counts_against_a_request() -> None:
    """The limit is two. Stages that start or stop, and a server that restarts, count nothing."""
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2")
    for event in (
        StageStarted("batching", "i"),
        StageStopped("executor", "i", "its process ended"),
        ServerRestarted(),
    ):
        driven.done.clear()
        driven.tell(event)
        driven.ready()
        for entry_id in ("1", "2"):
            driven.tell(Recovered(entry_id, ()))
        assert driven.forwarded() == ["1", "2"]
    assert [item.deaths for item in driven.core.requests.ledger] == [0, 0]


def test_a_request_that_is_given_up_has_one_dead_letter_and_one_end() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1")
    driven.done.clear()
    driven.fail("1")
    driven.fail("1")
    letters = [each for each in driven.done if isinstance(each, do.AddDeadLetter)]
    assert [(each.entry.entry_id, each.deaths) for each in letters] == [("1", 2)]
    assert [each.cancel.code for each in driven.done if isinstance(each, do.End)] == ["lane_failed"]


def test_a_finished_request_is_acknowledged_and_counted_once() -> None:
    """Its end may be reported twice; an unknown entry may be a predecessor's."""
    driven = Driven()
    driven.ready()
    driven.let_in("1")
    driven.done.clear()
    driven.tell(RequestFinished("1", "1"))
    assert driven.done == [do.Acknowledge("1", "1")]
    rate = driven.core.requests.finish_rate.per_s(driven.now + SECOND)
    assert rate > 0
    driven.tell(RequestFinished("1", "1"))
    assert driven.core.requests.finish_rate.per_s(driven.now + SECOND) == rate


def test_epochs_and_resumed_requests_are_counted() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1", "2", "3")
    driven.core.take_counts()
    driven.tell(StageStarted("batching", "i"))
    driven.ready()
    for entry_id in ("1", "2", "3"):
        driven.tell(Recovered(entry_id, ()))
    assert driven.core.take_counts() == (1, 3)
    assert driven.core.take_counts() == (0, 0)


def test_a_cancellation_ends_the_wait_of_a_long_prompt() -> None:
    driven = Driven()
    driven.ready()
    driven.core.requests.incoming.add([entry("1")])
    driven.core.requests.incoming.set_apart("1")
    driven.done.clear()
    driven.tell(Cancel("1", "1", "cancelled", "cancelled", ""))
    assert driven.done == [do.StopWaiting("1")]


def test_a_shorter_drain_ends_it_sooner_and_a_longer_one_not_later() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1")
    for seconds, until in ((20, 21), (5, 6), (30, 6)):
        driven.tell(Drain(seconds * SECOND))
        assert driven.core.wake_at_ns() == until * SECOND
    driven.done.clear()
    driven.now = 6 * SECOND
    driven.tell(driven.core.tick)
    (cut,) = [each.cancel for each in driven.done if isinstance(each, do.CutShort)]
    assert cut.code == "shutting_down"
    assert driven.core.wake_at_ns() is None


def test_the_lane_wakes_up_to_go_on_without_missing_replicas() -> None:
    driven = Driven(replicas=2)
    present = [role for role in driven.core.participants.roles if not role.endswith(".1")]
    driven.ready(*present)
    assert not driven.core.is_open
    wake_at_ns = driven.core.wake_at_ns()
    assert wake_at_ns is not None
    driven.now = wake_at_ns
    driven.tell(driven.core.tick)
    assert driven.core.is_open
    assert driven.core.wake_at_ns() is None


def test_a_draining_lane_takes_no_entries_and_is_drained_when_all_are_answered() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1")
    driven.core.requests.incoming.add([entry("2")])
    driven.core.requests.incoming.set_apart("2")
    driven.done.clear()
    driven.tell(Drain(SECOND))
    assert driven.done == [do.StopTaking(), do.StopWaiting()]
    driven.tell(RequestFinished("1", "1"))
    driven.tell(driven.core.tick)
    assert do.Drained() not in driven.done  # A long prompt is still apart.
    driven.arrive("2")
    driven.tell(RequestFinished("2", "2"))
    driven.tell(driven.core.tick)
    assert driven.done[-1] == do.Drained()


def test_all_requests_are_ended_from_outside_also_those_that_wait_apart() -> None:
    driven = Driven()
    driven.ready()
    driven.let_in("1")
    driven.core.requests.incoming.add([entry("2")])
    driven.core.requests.incoming.set_apart("2")
    driven.done.clear()
    driven.tell(CancelAll())
    (cut,) = [each.cancel for each in driven.done if isinstance(each, do.CutShort)]
    assert (cut.entry_id, cut.code) == ("1", "aborted")
    assert do.StopWaiting("2") in driven.done
    driven.arrive("2")
    end = driven.judged[-1].end
    assert end is not None
    assert (end.entry_id, end.code) == ("2", "aborted")


@pytest.mark.parametrize("in_ledger", [True, False])
def test_a_cancellation_without_an_entry_finds_it_by_the_request_id(in_ledger: bool) -> None:
    driven = Driven()
    driven.ready()
    arriving = named("1", "a")
    driven.core.requests.incoming.add([arriving])
    arrives = partial(driven.core.arrive, Arrival(arriving, driven.now, None))
    cancel = Cancel("a", "", "cancelled", "cancelled", "")
    for event in (arrives, cancel) if in_ledger else (cancel, arrives):
        driven.tell(event)
    if in_ledger:
        (cut,) = [each.cancel for each in driven.done if isinstance(each, do.CutShort)]
        assert (cut.request_id, cut.entry_id) == ("a", "1")
    assert driven.judged[0].end == (None if in_ledger else cancel)
    driven.tell(Cancel("b", "", "cancelled", "cancelled", ""))  # An unknown one does nothing.
    assert len(driven.core.requests.ledger) == 1


@pytest.mark.parametrize("fails_at", ["judging", "sending"])
def test_a_request_that_cannot_be_processed_or_sent_is_dead_lettered(fails_at: str) -> None:
    error = ErrorInfo(code="message_too_large", message="")
    driven = Driven()
    driven.ready()
    driven.failure = error if fails_at == "judging" else None
    driven.let_in("1")
    if fails_at == "sending":
        driven.tell(partial(driven.core.give_up, "1", error))
        driven.tell(partial(driven.core.give_up, "unknown", error))
    letters = [each.error for each in driven.done if isinstance(each, do.AddDeadLetter)]
    ends = [each.cancel.code for each in driven.done if isinstance(each, do.End)]
    assert (letters, ends) == ([error], ["message_too_large"])


def test_a_long_prompt_of_a_predecessor_runs_after_the_others() -> None:
    driven = Driven()
    driven.is_long = True
    driven.tell(partial(driven.core.inherit, [entry("1")], "taken over"))
    driven.ready()
    assert driven.core.is_open
    (tokenized,) = [each.arrival for each in driven.done if isinstance(each, do.Tokenize)]
    assert tokenized.way == "late"
    driven.done.clear()
    driven.tell(partial(driven.core.arrive, tokenized))
    assert driven.kinds() == ["Ask"]
    driven.tell(Recovered("1", ()))
    assert driven.forwarded() == ["1"]
    assert driven.core.is_open


def test_a_replica_without_a_part_in_the_epoch_joins_without_a_new_one() -> None:
    driven = Driven(replicas=2)
    driven.ready(*(role for role in driven.core.participants.roles if not role.endswith(".1")))
    driven.now = driven.core.wake_at_ns() or 0
    driven.tell(driven.core.tick)
    epoch = driven.core.epoch
    driven.tell(StageStopped("executor.1", "i", "stopped"))
    driven.done.clear()
    driven.tell(StageStarted("executor.1", "i"))
    assert driven.done == [do.SendReset("batching.1"), do.SendReset("executor.1")]
    assert driven.core.epoch == epoch


def test_an_unknown_message_is_logged() -> None:
    (line,) = Driven().core.handle(Pause(), SECOND)
    assert isinstance(line, do.Log)
    assert line.fields == {"type": "Pause"}

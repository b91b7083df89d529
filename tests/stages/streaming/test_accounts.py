"""Causes add up to a request's life, and bills to the device's busy time, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from nano_inference.bus.messages import RequestOpened, StoredResponse, StoredSample
from nano_inference.bus.parts.accounts import RequestTimes
from nano_inference.bus.parts.speculation import DraftsResult, VerifiedDraft
from nano_inference.bus.parts.tiers import FetchedBlocks
from nano_inference.bus.public import Completion, StageTime, Usage
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.bus.sections import with_sections
from nano_inference.bus.steps import StartedSequence, StepResult
from nano_inference.bus.times import CAUSES, StepTimes
from nano_inference.stages.streaming.core import StreamingCore
from nano_inference.stages.streaming.deliveries import Deliveries
from nano_inference.stages.streaming.parts import accounts
from nano_inference.stages.streaming.parts.accounts import TimeAccounts

from .client import EVERYTHING, cancel_of, request_of

PROMPT = 7
Times = dict[str, int]


class Lane:
    """A streaming core, and steps as executors report them."""

    def __init__(self) -> None:
        self.core = StreamingCore(None, config=EVERYTHING)
        self.completions: list[Completion] = []

    def open(self, request_id: str = "r", now_ns: int = 120, **changes: Any) -> RequestOpened:
        opened = request_of(request_id, **({"queued_ns": 20, "stream": False} | changes))
        for each in self.core.open(opened, now_ns):
            self.read(each)
        return opened

    def step(
        self,
        start_ns: int,
        end_ns: int,
        tokens: Iterable[int] = (),
        *,
        new: Iterable[StartedSequence] = (),
        ends: Iterable[int] = (),
        replica: int = 0,
        now_ns: int = 0,
        ended: tuple[Any, ...] = (),
        drafts: tuple[VerifiedDraft, ...] = (),
        **times: Any,
    ) -> None:
        """A step; `num_tokens` defaults to a token for each row that samples."""
        rows, ends = tuple(tokens), set(ends)
        reasons = tuple("length" if seq_id in ends else "" for seq_id in rows)
        numbers = (9,) * len(rows)
        about = StepTimes(**({"num_tokens": len(rows)} | times))
        more = {"parts": (about, DraftsResult(drafts))}
        logprobs = (0.0,) * len(rows)
        head = (1, tuple(new), rows, numbers, logprobs, reasons, ended, 0, start_ns, end_ns)
        result = StepResult(*head, **more)  # type: ignore[arg-type]
        now_ns = now_ns or end_ns + 5
        self.read(self.core.absorb(result, now_ns, replica))
        for each in self.core.caught_up(now_ns):
            self.read(each)

    def read(self, deliveries: Deliveries) -> None:
        self.completions += [ended.completion for ended in deliveries.ended]

    def usage(self) -> Usage:
        (completion,) = self.completions
        return completion.usage


def started(
    seq_id: int, executed_ns: int, request_id: str = "r", **changes: Any
) -> StartedSequence:
    queued = StageTime(stage="fairness", start_ns=112, end_ns=150)
    fields = {"num_cached": 0, "num_generated": 0, "queued": queued, "sample_index": 0}
    ids = {"request_id": request_id, "entry_id": f"entry-{request_id}"}
    return StartedSequence(seq_id=seq_id, executed_ns=executed_ns, **(fields | ids | changes))


def causes(lane: Lane, *, life_ns: int) -> Times:
    time = lane.usage().time
    assert time is not None
    assert sum(time.values()) == life_ns
    assert time.keys() <= CAUSES.keys()
    return time


def test_a_life_from_the_queue_to_the_terminal_message() -> None:
    """It is dispatched at 150 while a step of others runs, and starts at 210 after two of them."""
    lane = Lane()
    lane.open()
    lane.step(140, 170, [90], num_tokens=5, prefills=((91, 4),))
    lane.step(175, 200, [90])
    lane.step(210, 260, [90], new=[started(1, 210)], num_tokens=6, prefills=((1, 5),))
    lane.step(262, 300, [90, 1], num_tokens=4, prefills=((1, 2), (93, 1)))
    lane.step(310, 330, [90, 1])
    lane.step(330, 345, [90, 1], ends=[1], now_ns=400)
    assert causes(lane, life_ns=320) == {
        "queue": 20,
        "credits": 38,
        "others_prefill": 20,
        "others_decode": 25,
        "own_prefill": 50 + 38,
        "own_decode": 20 + 15,
        "overhead": 10 + 2 + 5 + 10 + 2 + 10,
        "delivery": 55,
    }


def test_a_step_without_a_part_of_its_prompt_is_others_prefill() -> None:
    lane = Lane()
    lane.open()
    lane.step(150, 160, new=[started(1, 150)], num_tokens=3, prefills=((1, 3),))
    lane.step(160, 200, num_tokens=8, prefills=((2, 8),))
    lane.step(200, 230, [1], ends=[1], num_tokens=4, prefills=((1, 4),), now_ns=230)
    assert causes(lane, life_ns=150) == {
        "queue": 20,
        "credits": 38,
        "others_prefill": 40,
        "own_prefill": 40,
        "overhead": 12,
    }


def test_a_preemption_lasts_until_the_next_token() -> None:
    """Also if it computes its KV again; if it found all of it, the step gives its next token."""
    lane = Lane()
    lane.open()
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    lane.step(160, 170, [2], left=((1, "preemption"),))
    lane.step(170, 180, [2])
    again = started(1, 190, num_generated=1)
    lane.step(190, 200, num_tokens=6, new=[again], prefills=((1, 6),))
    lane.step(200, 210, [1], num_tokens=2, prefills=((1, 2),))
    lane.step(210, 220, [2], left=((1, "preemption"),))
    again = started(1, 230, num_generated=2, num_cached=PROMPT + 1)
    lane.step(230, 240, [1], new=[again], prefills=((1, 1),))
    lane.step(250, 260, [1], ends=[1], now_ns=260)
    time = causes(lane, life_ns=180)
    assert (time["preemption"], time["own_decode"], time["own_prefill"]) == (50 + 20, 20, 10)
    assert time["overhead"] == 10 + 2 + 10


def test_time_without_steps_belongs_to_weights_while_none_is_allowed() -> None:
    """The step that puts them in place begins with that, for which nobody pays."""
    lane = Lane()
    lane.open()
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    lane.step(160, 170, [1])
    lane.step(230, 250, [1], held_ns=(172, 220), changed_ns=240)
    lane.step(250, 260, [1], ends=[1], now_ns=260)
    time = causes(lane, life_ns=180)
    assert (time["weights"], time["own_decode"]) == (48 + 10, 10 + 10 + 10)
    assert time["overhead"] == 12 + 2 + 10
    assert lane.core.part(TimeAccounts).busy_ns == lane.usage().billed_ns == 10 + 10 + 10 + 10


def test_blocks_from_a_tier_are_waited_for() -> None:
    lane = Lane()
    lane.open()
    lane.step(140, 180, [90])
    new = started(1, 230, num_cached=PROMPT - 1, parts=(FetchedBlocks(160, 1),))
    lane.step(230, 240, [1], new=[new], prefills=((1, 1),), ends=[1], now_ns=240)
    assert causes(lane, life_ns=160) == {
        "queue": 20,
        "credits": 38,
        "others_decode": 10,
        "own_prefill": 10,
        "kv": 70,
        "overhead": 12,
    }


def test_a_handover_is_waiting_for_kv() -> None:
    """The second replica gives the next token; its clock may be behind."""
    lane = Lane()
    lane.open()
    first = started(1, 150, hands_over=True)
    lane.step(150, 160, [1], new=[first], num_tokens=7, prefills=((1, 7),))
    lane.step(165, 200, [2], replica=1)
    second = started(1, 200, handed_over=True, num_generated=1, num_cached=PROMPT)
    lane.step(200, 210, [1, 2], new=[second], num_tokens=2, prefills=((1, 1),), replica=1)
    lane.step(205, 220, [1, 2], ends=[1], replica=1, now_ns=220)
    assert lane.usage().billed_ns == 7 + 5 + 5, "a prompt of 7 tokens at 1, and a rest of 3"
    time = causes(lane, life_ns=140)
    assert (time["own_prefill"], time["kv"], time["own_decode"]) == (10, 40, 20)


def test_a_failure_lasts_from_the_last_step_to_the_next_token() -> None:
    """Time before the failure keeps its causes, also for a request that had not begun."""
    lane = Lane()
    opened = [lane.open(name) for name in ("r", "waits")]
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    lane.step(160, 180, [1])
    lane.core.reset()
    for each in opened:
        lane.core.open(each, 500)
    assert lane.core.knows(RecoveryItem("r", "entry-r", "r"))
    again = started(1, 600, num_generated=2)
    lane.step(600, 650, [1], new=[again], num_tokens=9, prefills=((1, 9),), now_ns=660)
    lane.step(650, 670, [1], ends=[1], now_ns=670)
    time = causes(lane, life_ns=590)
    assert (time["recovery"], time["own_prefill"], time["own_decode"]) == (470, 10, 40)
    assert lane.usage().billed_ns == lane.core.part(TimeAccounts).busy_ns == 100
    queued = StageTime(stage="fairness", start_ns=510, end_ns=690)
    lane.completions.clear()
    new = started(2, 690, "waits", queued=queued)
    lane.step(690, 700, [2], new=[new], ends=[2], prefills=((2, 1),), now_ns=700)
    assert causes(lane, life_ns=620) == {
        "queue": 20,
        "credits": 70 + 180,
        "recovery": 330,
        "own_prefill": 10,
        "overhead": 10,
    }


def test_the_furthest_sample_says_the_cause() -> None:
    lane = Lane()
    lane.open(n=2)
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    second = started(2, 170, sample_index=1)
    lane.step(170, 190, [1, 2], new=[second], num_tokens=8, prefills=((2, 7),))
    lane.step(190, 200, [1, 2], ends=[1])
    lane.step(210, 220, [3], left=((2, "preemption"),))
    again = started(2, 240, sample_index=1, num_generated=1, num_cached=PROMPT)
    lane.step(240, 250, [2], new=[again], prefills=((2, 1),), ends=[2], now_ns=260)
    time = causes(lane, life_ns=180)
    assert (time["own_decode"], time["preemption"], time["delivery"]) == (20 + 10 + 10, 40, 10)
    assert lane.usage().billed_ns == 7 + 16 + 16 + 10


def test_a_request_that_is_cut_short_has_all_its_time() -> None:
    lane = Lane()
    lane.open()
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    lane.step(160, 180, [1])
    lane.step(180, 190, [2], ended=(cancel_of(),), now_ns=200)
    assert causes(lane, life_ns=120)["delivery"] == 10
    lane.open("q")
    lane.completions.clear()
    lane.read(lane.core.end(cancel_of("q", unstarted=True), 320))
    assert causes(lane, life_ns=240) == {"queue": 20, "credits": 210, "overhead": 10}


def test_a_cached_response_has_its_time_and_no_bill() -> None:
    lane = Lane()
    response = StoredResponse((StoredSample((5,), (0.0,), (), "stop"),), 0, 0, 1)
    lane.open(response=response, now_ns=130)
    assert causes(lane, life_ns=50) == {"queue": 20, "overhead": 10, "delivery": 20}
    assert lane.usage().billed_ns == 0


def test_a_restored_request_has_the_time_since_the_failure() -> None:
    """Time before the failure is unknown, and no request is billed for it."""
    lane, successor = Lane(), Lane()
    lane.open(stream=True)
    lane.step(150, 160, [1], new=[started(1, 150)], num_tokens=7, prefills=((1, 7),))
    chunk = lane.core._requests["r"].samples[0].chunk(0, "")
    lane.core.reset()
    for each in (lane, successor):
        # The first one has it still, but not as its stream has it.
        each.open(stream=True, down_since_ns=400, now_ns=410)
        assert each.core.restore(RecoveryItem("r", "entry-r", "r"), [chunk], 410)
        again = started(1, 600, num_generated=1)
        each.step(600, 650, [1], new=[again], num_tokens=8, prefills=((1, 8),))
        each.step(650, 660, [1], ends=[1], now_ns=670)
        unknown = causes(each, life_ns=590)["unknown"]
        rest = {"recovery": 650 - 110 - unknown, "own_decode": 10, "delivery": 10}
        assert each.usage().time == {"queue": 20, "overhead": 10, "unknown": unknown} | rest
        assert each.usage().billed_ns == each.core.part(TimeAccounts).billed_ns == 50 + 10
    assert unknown == 290


@pytest.mark.parametrize(("taken_ns", "queued_ns", "wanted"), [(120, 20, 20), (0, 0, 0)])
def test_a_refused_request_has_its_time(taken_ns: int, queued_ns: int, wanted: int) -> None:
    lane = Lane()
    cancel = cancel_of(unstarted=True, taken_ns=taken_ns, queued_ns=queued_ns)
    lane.read(lane.core.end(cancel, 150))
    time = {"queue": wanted, "overhead": 30} if wanted else {}
    assert causes(lane, life_ns=30 + wanted if wanted else 0) == time
    assert (lane.usage().billed_ns, lane.completions[0].timings.published_ns) == (
        0,
        100 if wanted else 150,
    )


def test_steps_before_the_request_is_known_count_when_it_is() -> None:
    """Over Redis its steps may come first; it owes for no step after its end."""
    lane = Lane()
    lane.open("s")
    new = [started(1, 150, "r"), started(2, 150, "s")]
    lane.step(150, 164, [1, 2], new=new, num_tokens=14, prefills=((1, 7), (2, 7)))
    lane.step(164, 174, [1, 2])
    lane.step(174, 184, [1, 2], ends=[1])
    lane.step(184, 194, [2])
    lane.open("r", now_ns=200)
    time = causes(lane, life_ns=120)
    assert (time["own_prefill"], time["own_decode"], time["delivery"]) == (14, 20, 16)
    assert lane.usage().billed_ns == 7 + 5 + 5
    assert lane.core.part(TimeAccounts).billed_ns == 7 + 5 + 5 + 7 + 5 + 5 + 10
    lane.step(200, 220, [2], ends=[2])
    bills = [completion.usage.billed_ns for completion in lane.completions]
    assert (
        lane.core.part(TimeAccounts).billed_ns
        == sum(filter(None, bills))
        == lane.core.part(TimeAccounts).busy_ns
    )


def test_a_steps_time_is_divided_by_tokens_and_shared_prefills_are_halved() -> None:
    """Nobody pays for a row whose sequence has ended; remainders go to the next step."""
    lane = Lane()
    for name in ("r", "s", "t"):
        lane.open(name)
    new = [started(number, 150, name) for number, name in enumerate(("r", "s", "t"), 1)]
    rows = ((1, 6), (2, 0), (3, 4))
    lane.step(150, 261, [1, 2, 3], new=new, num_tokens=10, prefills=rows)
    lane.step(261, 301, [1, 2, 3, 4], ends=[1, 2])
    drafts = (VerifiedDraft(3, "ngram", 2, 1),)
    lane.step(301, 331, [3], ends=[3], num_tokens=3, drafts=drafts)
    bills = [completion.usage.billed_ns for completion in lane.completions]
    assert bills == [33 + 10, 33 + 10, 44 + 10 + 30]
    assert lane.core.part(TimeAccounts).billed_ns == sum(filter(None, bills))
    assert lane.core.part(TimeAccounts).busy_ns == 181


def test_sequences_in_turns_over_pipeline_stages_share_decoded_tokens() -> None:
    """Steps overlap; each counts from the end of the one before."""
    lane = Lane()
    for name in ("r", "s"):
        lane.open(name)
    new = [started(1, 150, "r"), started(2, 150, "s")]
    lane.step(150, 160, [1, 2], new=new, num_tokens=2, prefills=((1, 1), (2, 1)))
    lane.step(160, 181, [1])
    lane.step(165, 200, [2])
    lane.step(180, 210, [1], ends=[1])
    lane.step(190, 221, [2], ends=[2])
    bills = [completion.usage.billed_ns for completion in lane.completions]
    assert bills == [5 + 25, 5 + 25 + 11]
    assert lane.core.part(TimeAccounts).busy_ns == 71


def test_old_steps_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_STEPS", 64)
    device = accounts.DeviceTime()
    for number in range(1000):
        device.step(StepTimes(num_tokens=1), 10 * number + 4, 10 * number + 10)
    assert len(device._past) <= 64
    for at_ns in range(5, 10_000, 503):
        passed_ns = device.totals[1] - device.totals_at(at_ns)[1]
        assert abs(passed_ns - 0.6 * (10_000 - at_ns)) < 0.06 * 10_000


def times_of(opened: RequestOpened) -> RequestTimes:
    return RequestTimes.find(opened.parts) or RequestTimes()


class World:
    """Replicas that run random lives, on clocks of their own."""

    def __init__(self, random: Random) -> None:
        self.lane = Lane()
        self.random = random
        self.now_ns = 1_000
        self.seq_ids = iter(range(10**6))
        # Requests: those opened, by id; samples to start; running sequences of each replica.
        self.opened: dict[str, tuple[RequestOpened, int]] = {}
        self.waiting: list[tuple[str, int, int]] = []  # request, sample, tokens
        self.running: list[dict[int, tuple[str, int, int]]] = [{}, {}]
        self.prefilling: list[dict[int, int]] = [{}, {}]
        self.ends_ns = [0, 0]
        self.skews_ns = [self.pick(-300, 0, 400), self.pick(-300, 0, 400)]
        self.num_before = 0  # completions of this core's predecessors

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def pass_time(self) -> None:
        self.now_ns += self.random.randint(0, 60)

    def arrive(self) -> None:
        name, n = f"r{len(self.opened)}", self.pick(1, 1, 2, 3)
        queued_ns, has_budget = self.pick(0, 50), self.pick(0, 1)
        start_ns, waited_ns = self.now_ns - queued_ns, queued_ns * has_budget
        about: dict[str, Any] = {
            "queued_ns": queued_ns,
            "waited_ns": waited_ns,
            "received_ns": self.now_ns - waited_ns,
            "admitted_ns": self.now_ns + self.pick(-5, 3, 200),
        }
        if self.pick(*range(8)) == 0:
            about["response"] = StoredResponse((StoredSample((5,), (0.0,), (), "stop"),), 0, 0, 1)
        self.pass_time()
        about["down_since_ns"] = self.pick(0, 0, 0, self.now_ns - 7)
        opened = self.lane.open(name, self.now_ns, n=n, **about)
        self.opened[name] = opened, start_ns
        if "response" not in about:
            self.waiting += [(name, index, 0) for index in range(n)]

    def start(self, replica: int, executed_ns: int) -> list[StartedSequence]:
        new = []
        for _ in range(self.pick(0, 1, 2)):
            if not self.waiting:
                break
            name, index, generated = self.waiting.pop(self.pick(0, len(self.waiting) - 1))
            seq_id = next(self.seq_ids)
            self.running[replica][seq_id] = name, index, generated
            cached = self.pick(0, PROMPT - 1, PROMPT - 1 + generated)
            left = PROMPT + generated - min(cached, PROMPT - 1 + generated)
            self.prefilling[replica][seq_id] = left
            queued = StageTime(
                stage="fairness",
                start_ns=executed_ns - self.pick(10, 500),
                end_ns=executed_ns - self.pick(0, 9, 90),
            )
            new.append(
                started(
                    seq_id,
                    executed_ns,
                    name,
                    sample_index=index,
                    num_generated=generated,
                    num_cached=PROMPT + generated - left,
                    queued=self.pick(queued, None),
                    parts=self.pick((), (), (FetchedBlocks(executed_ns - 40, 1),)),
                )
            )
        return new

    def step(self, replica: int) -> None:
        """Sequences leave; others start; prompts are computed in parts; some end."""
        running, prefilling = self.running[replica], self.prefilling[replica]
        left = []
        for seq_id in [each for each in running if self.pick(*range(10)) == 0]:
            left.append((seq_id, self.pick("preemption", "weights")))
            self.waiting.append(running.pop(seq_id))
            prefilling.pop(seq_id, None)
        self.pass_time()
        start_ns = self.now_ns + self.skews_ns[replica]
        held = self.pick(None, None, (start_ns - 30, start_ns - self.pick(-5, 5)))
        new = self.start(replica, start_ns)
        self.pass_time()
        changed_ns = self.pick(0, 0, start_ns + 3)
        decodes = [seq_id for seq_id in running if seq_id not in prefilling]
        prefills, tokens = [], list(decodes)
        for seq_id, rest in list(prefilling.items()):
            number = min(rest, self.pick(0, 3, PROMPT))
            if number:
                prefills.append((seq_id, number))
                prefilling[seq_id] = rest - number
                if rest == number:
                    del prefilling[seq_id]
                    tokens.append(seq_id)
        ends = [seq_id for seq_id in tokens if self.pick(*range(5)) == 0]
        for seq_id in tokens:
            name, index, generated = running[seq_id]
            running[seq_id] = name, index, generated + 1
        for seq_id in ends:
            del running[seq_id]
        wasted = self.pick(0, 0, 1)
        self.lane.step(
            start_ns,
            self.now_ns + self.skews_ns[replica],
            tokens,
            new=new,
            ends=ends,
            replica=replica,
            now_ns=self.now_ns,
            num_tokens=len(decodes) + sum(number for _, number in prefills) + wasted,
            prefills=tuple(prefills),
            left=tuple(left),
            held_ns=held,
            changed_ns=changed_ns,
        )

    def forget(self, name: str) -> None:
        self.waiting = [each for each in self.waiting if each[0] != name]
        for running, prefilling in zip(self.running, self.prefilling, strict=True):
            for seq_id in [seq_id for seq_id, each in running.items() if each[0] == name]:
                del running[seq_id]
                prefilling.pop(seq_id, None)

    def cancel(self) -> None:
        if self.opened:
            name = self.pick(*self.opened)
            self.pass_time()
            unstarted = any(each[0] == name for each in self.waiting)
            end = self.lane.core.end
            self.lane.read(end(cancel_of(name, unstarted=unstarted), self.now_ns))
            self.forget(name)

    def fail(self) -> None:
        core, down_ns = self.lane.core, self.now_ns
        core.reset()
        self.pass_time()
        if is_restarted := self.pick(False, False, True):
            self.lane.core, self.num_before = (
                StreamingCore(None, config=EVERYTHING),
                len(self.lane.completions),
            )
        done = {each.request_id for each in self.lane.completions}
        for replica in (0, 1):
            self.waiting += self.running[replica].values()
            self.running[replica].clear()
            self.prefilling[replica].clear()
        for name, (opened, _) in self.opened.items():
            if name in done:
                continue
            known = core._requests.get(name)
            if is_restarted:
                opened = with_sections(opened, replace(times_of(opened), down_since_ns=down_ns))
            self.lane.core.open(opened, self.now_ns)
            if is_restarted and known is not None:
                chunks = [each.chunk(0, "") for each in known.samples.values()]
                self.lane.core.restore(
                    RecoveryItem(name, opened.entry_id, name), chunks, self.now_ns
                )


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_no_nanosecond_is_lost_in_any_life(first: int) -> None:
    """Several replicas on clocks that differ, samples, preemption, failures, cancellation."""
    for seed in range(first, first + 50):
        live_and_add_up(seed)


def live_and_add_up(seed: int) -> None:
    world = World(Random(seed))
    steps = [lambda: world.step(0), lambda: world.step(1)]
    acts = [world.arrive, world.arrive, world.cancel, world.fail, *steps * 4]
    for _ in range(world.random.randint(1, 80)):
        world.random.choice(acts)()
    for name in world.opened:
        if name not in {each.request_id for each in world.lane.completions}:
            world.pass_time()
            cancel = cancel_of(name, unstarted=True)
            world.lane.read(world.lane.core.end(cancel, world.now_ns))
    found, bills = world.lane.core.part(TimeAccounts), []
    assert len(world.lane.completions) == len(world.opened)
    for completion in world.lane.completions:
        time, billed_ns = completion.usage.time, completion.usage.billed_ns
        assert time is not None
        assert billed_ns is not None
        assert min(time.values(), default=1) > 0
        timings, start_ns = completion.timings, world.opened[completion.request_id][1]
        assert sum(time.values()) == timings.finished_ns - start_ns
        assert timings.published_ns == start_ns
        bills.append(billed_ns)
    del bills[: world.num_before]
    assert min(bills, default=0) >= 0
    assert sum(bills) == found.billed_ns <= found.busy_ns

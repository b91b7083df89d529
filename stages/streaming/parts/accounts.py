"""Accounts of time: what a replica's device did, the life of each request by cause, and its bill.

A step adds to totals of its device, whatever its number of rows. A request takes differences of
these totals where its state changes: it starts, has a first token, is preempted, ends. Both move a
cursor that never goes back, and give the time since the cursor to one cause. So causes add up to a
request's life, and bills with the unbilled time to the device's busy time, exactly. docs/time.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Final, Literal, NamedTuple

import msgspec

from ....bus.control import Cancel
from ....bus.messages import RequestOpened
from ....bus.parts.accounts import RequestTimes
from ....bus.parts.speculation import DraftsResult, VerifiedDraft
from ....bus.parts.tiers import FetchedBlocks
from ....bus.public import CompletionChunk
from ....bus.steps import StartedSequence
from ....bus.times import CAUSES, NO_TIMES, Break, Cause, StepTimes
from ..deliveries import Deliveries, Ending
from ..samples import RequestState, Sample
from ..step import Step
from . import Part

MOST_STEPS = 4096
"""Steps of a device that are remembered. Every other one of the older half is then dropped, and the
totals in between are interpolated."""

State = Literal["decode", "prefill", "ready", "ended"] | Cause
"""The state of a sample or a request: computing, in batching's queue, ended, or a cause of its
whole time.
"""

_PRECEDENCE: Final[dict[State, int]] = {"decode": 4, "prefill": 3, "kv": 2}
"""Precedence of states: of several samples, the one with the largest number gives the cause; other
states have 1.
"""

Totals = tuple[int, int, int, int]
"""A device's totals until an instant: time of steps with prompt tokens, of other steps, and without
steps since none was allowed or weights were changed; and the debt of a sequence that has always
decoded.
"""

_NOTHING: Totals = (0, 0, 0, 0)


class StepCost(NamedTuple):
    """Cost of a step.

    Attributes:
        busy_ns: Time of the device.
        price_ns: Price of each of its tokens, in nanoseconds.
    """

    busy_ns: int
    price_ns: int


class DeviceTime:
    """The time of one replica's device, in an epoch.

    Steps that overlap, as with several pipeline stages, are counted from the end of the one before.

    A step's time is divided by the tokens that it computed; the remainder is added to the next
    step's. A sequence owes for its tokens, drafted ones included; where only some of the decoding
    sequences are in a step, all of them share its decoded tokens.

    Attributes:
        at_ns: End of the last step.
        num_decoding: Sequences that compute a token in each step, or in each round of stages.
    """

    def __init__(self) -> None:
        self.at_ns = self.num_decoding = 0
        self.totals: Totals = _NOTHING
        self._last_busy_ns = self._last_price_ns = self._rest_ns = self._shared_rest_ns = 0
        # Bills without those of sequences that decode, which began at these prices together.
        self._settled_ns = self._begun_ns = 0
        self._is_thinned = False
        # Intervals: end, start, which of the totals grew, totals at the end.
        self._past: list[tuple[int, int, int, Totals]] = []

    @property
    def busy_ns(self) -> int:
        """Time of all steps."""
        return self.totals[0] + self.totals[1]

    @property
    def billed_ns(self) -> int:
        """The part of it that requests owe."""
        return self._settled_ns + self.num_decoding * self.totals[3] - self._begun_ns

    @property
    def cost(self) -> StepCost:
        """The cost of the last step."""
        return StepCost(self._last_busy_ns, self._last_price_ns)

    def step(self, times: StepTimes, start_ns: int, end_ns: int, num_drafted: int = 0) -> None:
        """Add a step.

        Hot path: it runs for each step, so its parts are not functions.

        Args:
            times: Its times.
            start_ns: Its start.
            end_ns: Its end.
            num_drafted: Drafted tokens that it verified.
        """
        if times.held_ns is not None or times.changed_ns:
            if times.held_ns is not None:
                self._hold(times.held_ns[0], min(times.held_ns[1], start_ns))
            self._hold(start_ns, times.changed_ns)
        if start_ns < self.at_ns:
            start_ns = self.at_ns
        if end_ns < start_ns:
            end_ns = start_ns
        self.at_ns = end_ns
        if not (num_tokens := times.num_tokens):
            self._last_busy_ns = self._last_price_ns = 0
            return
        busy_ns = self._last_busy_ns = end_ns - start_ns
        price_ns, self._rest_ns = divmod(busy_ns + self._rest_ns, num_tokens)
        self._last_price_ns = owed_ns = price_ns
        prefill_ns, decode_ns, weights_ns, total_price_ns = self.totals
        if times.prefills:
            kind, prefill_ns = 0, prefill_ns + busy_ns
            num_tokens -= sum([number for _, number in times.prefills])
        else:
            kind, decode_ns = 1, decode_ns + busy_ns
        if num_decoding := self.num_decoding:
            num_tokens -= num_drafted
            if num_tokens < num_decoding:
                owed_ns, self._shared_rest_ns = divmod(
                    price_ns * num_tokens + self._shared_rest_ns, num_decoding
                )
            total_price_ns += owed_ns
        self.totals = (prefill_ns, decode_ns, weights_ns, total_price_ns)
        self._past.append((end_ns, start_ns, kind, self.totals))
        if len(self._past) > MOST_STEPS:
            del self._past[1 : MOST_STEPS // 2 : 2]
            self._is_thinned = True

    def totals_at(self, at_ns: int) -> Totals:
        """Return the totals at an instant; after the last step, those at its end."""
        if at_ns >= self.at_ns or not self._past:
            return self.totals
        past = self._past
        index = len(past) - 1
        if at_ns <= past[index][1]:
            index = bisect_left(past, at_ns, key=itemgetter(0))
        elif at_ns >= past[index][0]:
            return self.totals
        end_ns, start_ns, kind, after = past[index]
        since_ns, _, _, earlier = past[index - 1] if index else (0, 0, 0, _NOTHING)
        before = [*after]
        before[kind] -= end_ns - max(start_ns, at_ns)
        if at_ns < end_ns:
            before[3] = earlier[3]  # owed at the end of a step
        if at_ns < start_ns and (index or self._is_thinned):
            if not self._is_thinned:
                return earlier
            part, span = at_ns - since_ns, start_ns - since_ns
            pairs = zip(earlier, before, strict=True)
            before = [first + (last - first) * part // span for first, last in pairs]
        return (before[0], before[1], before[2], before[3])

    def join(self, at_ns: int) -> int:
        """Let a sequence decode from then on; return the price at which it begins."""
        price_ns = self.totals_at(at_ns)[3]
        self.num_decoding += 1
        self._begun_ns += price_ns
        return price_ns

    def leave(self, at_ns: int, begun_ns: int) -> int:
        """Let a sequence decode no more; return what it owes since `join`, which returned
        `begun_ns`."""
        owed_ns = max(self.totals_at(at_ns)[3] - begun_ns, 0)
        self.num_decoding -= 1
        self._begun_ns -= begun_ns
        self._settled_ns += owed_ns
        return owed_ns

    def bill(self, owed_ns: int) -> None:
        """Bill a request for tokens of a prompt, or drafted ones."""
        self._settled_ns += owed_ns

    def _hold(self, since_ns: int, until_ns: int) -> None:
        """Add time in which no step could run."""
        since_ns = max(since_ns, self.at_ns)
        if until_ns <= since_ns:
            return
        prefill_ns, decode_ns, weights_ns, price_ns = self.totals
        self.totals = (prefill_ns, decode_ns, weights_ns + until_ns - since_ns, price_ns)
        self._past.append((until_ns, since_ns, 2, self.totals))
        self.at_ns = until_ns


@dataclass(slots=True)
class _SampleTime:
    """A sample's state. `begun_ns`: of `DeviceTime.join`; None while it does not decode."""

    state: State
    device: DeviceTime
    hands_over: bool = False
    begun_ns: int | None = None


@dataclass(slots=True)
class RequestTime:
    """The life of a request by cause, and its bill.

    An instant of another host's clock counts between the cursor and the time of the call.

    Attributes:
        n: Number of samples.
        start_ns: When it was published.
        cursor_ns: Until when the time has a cause.
        causes: Nanoseconds by cause.
        billed_ns: Its share of the busy time, without sequences that decode now.
    """

    n: int
    start_ns: int
    cursor_ns: int
    causes: dict[Cause, int] = field(default_factory=dict)
    billed_ns: int = 0
    # While no sample runs: the state, and batching's replica if it is "ready".
    _base: State = "credits"
    _base_device: DeviceTime | None = None
    _samples: dict[int, _SampleTime] = field(default_factory=dict)
    # Totals of a device at the cursor.
    _device: DeviceTime | None = None
    _totals: Totals = _NOTHING
    # Time of steps since the cursor with tokens of its prompt; the end of the last one.
    _own_ns: int = 0
    _own_end_ns: int = 0

    @classmethod
    def opened(cls, opened: RequestOpened, before: RequestTimes, now_ns: int) -> RequestTime:
        """Return the account of a request that enters the lane. `before`: admission's instants."""
        # For a request with a budget, `received_ns` is its publication.
        taken_ns = opened.received_ns + before.waited_ns
        start_ns = taken_ns - before.queued_ns
        time = cls(opened.n, start_ns, start_ns)
        time._give(taken_ns, now_ns, "queue")
        time._give(opened.admitted_ns, now_ns, "overhead")
        if before.down_since_ns:
            # It may have waited for credits or been computed: the account is lost.
            time._give(before.down_since_ns, now_ns, "unknown")
            time._base = "recovery"
        return time

    @classmethod
    def ended_by_admission(cls, cancel: Cancel, now_ns: int) -> RequestTime:
        """Return the account of a request that admission refuses or ends."""
        taken_ns = cancel.taken_ns or now_ns
        start_ns = taken_ns - cancel.queued_ns
        time = cls(1, start_ns, start_ns, _base="overhead")
        time._give(taken_ns, now_ns, "queue")
        return time

    @classmethod
    def restored(cls, request: RequestState, before: RequestTimes, now_ns: int) -> RequestTime:
        """Return the account of a request that has begun, and whose account is lost."""
        begun = msgspec.structs.replace(before, down_since_ns=0)
        time = cls.opened(request.info, begun, now_ns)
        time._give(before.down_since_ns or now_ns, now_ns, "unknown")
        time._base = "recovery"
        for index, sample in request.samples.items():
            state: State = "recovery" if sample.finish_reason is None else "ended"
            time._samples[index] = _SampleTime(state, DeviceTime())
        return time

    def started(
        self, started: StartedSequence, num_prompt: int, device: DeviceTime, now_ns: int
    ) -> None:
        """Note a sequence's first step, or its first one after a break.

        Args:
            started: The sequence.
            num_prompt: Tokens of the prompt.
            device: The replica's.
            now_ns: The time.
        """
        sample = self._samples.get(started.sample_index)
        if sample is None:
            if not self._samples or self._top() is None:
                self._dispatched(started, device, now_ns)
            else:
                self._advance(started.executed_ns, now_ns)
            sample = _SampleTime("prefill", device, started.hands_over)
            self._samples[started.sample_index] = sample
        elif sample.state != "ended":
            self._bill(sample, device.at_ns)
            self._advance(started.executed_ns, now_ns)
            sample.device, sample.hands_over = device, started.hands_over
            # What it has to compute again belongs to the break.
            num_remaining = num_prompt + started.num_generated - started.num_cached
            if started.num_generated and num_remaining <= 1:
                sample.state = "decode"

    def computed(self, busy_ns: int, end_ns: int, billed_ns: int, device: DeviceTime) -> None:
        """Note a step that computed tokens of the prompt, or again after a break."""
        if busy_ns and end_ns != self._own_end_ns:
            self._own_ns += busy_ns
            self._own_end_ns = end_ns
        self.billed_ns += billed_ns
        device.bill(billed_ns)

    def token(self, index: int, end_ns: int, now_ns: int) -> None:
        """Note a sample's first token since it started, at the end of a step."""
        sample = self._samples[index]
        self._advance(end_ns, now_ns)
        if sample.hands_over:
            sample.state = "kv"
        else:
            sample.state, sample.begun_ns = "decode", sample.device.join(end_ns)

    def left(self, index: int, why: Break, now_ns: int) -> None:
        """Note that a sample has left the batch at the end of its device's last step."""
        sample = self._samples[index]
        self._advance(sample.device.at_ns, now_ns)
        self._bill(sample, sample.device.at_ns)
        sample.state = why

    def ended(self, index: int, end_ns: int, now_ns: int) -> None:
        """Note that a sample has ended, with a step that ended then."""
        sample = self._samples.get(index)
        if sample is not None and sample.state != "ended":
            self._advance(end_ns, now_ns)
            self._bill(sample, end_ns)
            sample.state = "ended"

    def failed(self, at_ns: int, now_ns: int) -> None:
        """Note that the lane has failed; its last step ended then."""
        self._advance(at_ns, now_ns)
        for sample in self._samples.values():
            if sample.state != "ended":
                self._bill(sample, at_ns)
                sample.state = "recovery"
        self._base, self._base_device = "recovery", None

    def finish(self, now_ns: int, *, served: bool = False) -> dict[str, int]:
        """End the life; return its causes. `served`: with a cached response."""
        cut_short = served and self._base == "credits"
        for sample in self._samples.values():
            if sample.state in ("decode", "prefill"):
                self._advance(sample.device.at_ns, now_ns)
                self._bill(sample, sample.device.at_ns)
                sample.state, cut_short = "ended", True
        self._advance(now_ns, now_ns, "delivery" if cut_short else None)
        return {cause: passed_ns for cause, passed_ns in self.causes.items() if passed_ns}

    def settle(self) -> int:
        """Return the bill of a request that is dropped."""
        for sample in self._samples.values():
            self._bill(sample, sample.device.at_ns)
        return self.billed_ns

    def _dispatched(self, started: StartedSequence, device: DeviceTime, now_ns: int) -> None:
        """Note when fairness and batching had the first sequence that begins."""
        if (queued := started.queued) is not None:
            transport = self._base == "credits" and not self._samples
            self._advance(queued.start_ns, now_ns, "overhead" if transport else self._base)
            self._advance(queued.end_ns, now_ns, "credits")
        self._base, self._base_device = "ready", device
        if (fetched := FetchedBlocks.find(started.parts)) is not None:
            self._advance(fetched.since_ns, now_ns)
            self._base = "kv"
        self._advance(started.executed_ns, now_ns)
        self._base = "credits"

    def _bill(self, sample: _SampleTime, at_ns: int) -> None:
        if sample.begun_ns is not None:
            self.billed_ns += sample.device.leave(at_ns, sample.begun_ns)
            sample.begun_ns = None

    def _top(self) -> _SampleTime | None:
        """Return the sample that counts; None if none runs."""
        if self.n == 1 and self._samples:
            (only,) = self._samples.values()
            return only if only.state != "ended" else None
        top, highest = None, 0
        for sample in self._samples.values():
            if sample.state != "ended" and (order := _PRECEDENCE.get(sample.state, 1)) > highest:
                top, highest = sample, order
        return top

    def _advance(self, to_ns: int, now_ns: int, cause: State | None = None) -> None:
        """Give the time until an instant to a cause; by the state of the request if it is None."""
        to_ns = min(to_ns, now_ns)
        if to_ns <= self.cursor_ns:
            return
        if cause is not None:
            self._give(to_ns, now_ns, cause)
        elif (top := self._top()) is None:
            is_done = len(self._samples) == self.n
            state: State = "delivery" if is_done else self._base
            self._split(to_ns, state, self._base_device)
        else:
            self._split(to_ns, top.state, top.device)

    def _split(self, to_ns: int, state: State, device: DeviceTime | None) -> None:
        """Give the time until an instant to the causes of a state."""
        if device is None or state not in ("decode", "prefill", "ready"):
            self._give(to_ns, to_ns, state)
            return
        before = self._totals if device is self._device else device.totals_at(self.cursor_ns)
        after = device.totals_at(to_ns)
        rest_ns, own_ns = to_ns - self.cursor_ns, self._own_ns
        self.cursor_ns, self._device, self._totals, self._own_ns = to_ns, device, after, 0
        rest_ns -= (prefill_ns := min(after[0] - before[0], rest_ns))
        rest_ns -= (decode_ns := min(after[1] - before[1], rest_ns))
        rest_ns -= (weights_ns := min(after[2] - before[2], rest_ns))
        causes = self.causes
        if state == "decode":
            causes["own_decode"] = causes.get("own_decode", 0) + prefill_ns + decode_ns
        else:
            if state == "prefill" and (own_ns := min(own_ns, prefill_ns)):
                causes["own_prefill"] = causes.get("own_prefill", 0) + own_ns
                prefill_ns -= own_ns
            if prefill_ns:
                causes["others_prefill"] = causes.get("others_prefill", 0) + prefill_ns
            if decode_ns:
                causes["others_decode"] = causes.get("others_decode", 0) + decode_ns
        if weights_ns:
            causes["weights"] = causes.get("weights", 0) + weights_ns
        causes["overhead"] = causes.get("overhead", 0) + rest_ns

    def _give(self, to_ns: int, now_ns: int, cause: State) -> None:
        """Give the time until an instant to one cause."""
        passed_ns = min(to_ns, now_ns) - self.cursor_ns
        if passed_ns > 0:
            self.cursor_ns += passed_ns
            self._device, self._own_ns = None, 0
            assert cause in CAUSES, "a state is no cause"
            self.causes[cause] = self.causes.get(cause, 0) + passed_ns


class _Counted(NamedTuple):
    """A step: its times, drafts and device, and its cost."""

    times: StepTimes
    drafts: tuple[VerifiedDraft, ...]
    device: DeviceTime
    cost: StepCost


class TimeAccounts(Part):
    """The accounts of all requests in flight, and of each replica's device."""

    def __init__(self, since_ns: int = 0) -> None:
        self._since_ns = since_ns
        self._devices: defaultdict[int, DeviceTime] = defaultdict(DeviceTime)
        # Sequences without a token since they started.
        self._fresh: set[int] = set()
        # Of requests that had not begun when an epoch ended, by entry.
        self._unbegun: dict[str, RequestTime] = {}
        self._now_ns = 0  # when the last step came
        # Of earlier epochs.
        self._busy_ns = self._billed_ns = 0

    @property
    def busy_ns(self) -> int:
        """Time of all steps so far."""
        return self._busy_ns + sum(device.busy_ns for device in self._devices.values())

    @property
    def billed_ns(self) -> int:
        """The part of `busy_ns` that requests owe, those in flight included."""
        return self._billed_ns + sum(device.billed_ns for device in self._devices.values())

    def load(self) -> dict[str, int]:
        """Return what adds up while no request is in flight: bills of the requests that ended since
        the accounts began are `billed_ns`."""
        return {
            "accounts_since_ns": self._since_ns,
            "busy_ns": self.busy_ns,
            "billed_ns": self.billed_ns,
        }

    def unbill(self, billed_ns: int) -> None:
        """Take back the bill of a request whose terminal message is not delivered."""
        self._billed_ns -= billed_ns

    def opened(self, request: RequestState, deliveries: Deliveries) -> None:
        time, now_ns = self._unbegun.pop(request.key, None), deliveries.now_ns
        if time is None:
            time = RequestTime.opened(request.info, _before(request), now_ns)
        request.notes[self] = time

    def received(self, step: Step) -> None:
        """Add the step to its device, and note sequences that left before."""
        parts, now_ns = step.result.parts, step.now_ns
        times, self._now_ns = StepTimes.find(parts) or NO_TIMES, now_ns
        for seq_id, why in times.left:
            if (sample := step.find(seq_id)) is not None:
                self._fresh.discard(seq_id)
                sample.request.notes[self].left(sample.index, why, now_ns)
        drafts = DraftsResult.find(parts) if len(parts) > 1 else None
        verified = () if drafts is None else drafts.verified
        drafted = sum([draft.num_tokens for draft in verified]) if verified else 0
        device = self._devices[step.replica]
        device.step(times, step.result.start_ns, step.result.end_ns, drafted)
        step.notes[self] = _Counted(times, verified, device, device.cost)

    def started(self, sample: Sample, started: StartedSequence, step: Step) -> None:
        info, time = sample.request.info, sample.request.notes[self]
        device = self._devices[step.replica]
        time.started(started, len(info.prompt_token_ids), device, step.now_ns)
        self._fresh.add(started.seq_id)

    def stepped(self, step: Step) -> None:
        """Account for rows that compute prompts, for drafted tokens, and for first tokens."""
        times, drafts, device, cost = step.notes[self]
        if not (times.prefills or self._fresh or drafts):
            return
        result, find = step.result, step.find
        if times.prefills:
            for seq_id, owed_ns in shares(times.prefills, cost.price_ns):
                if (sample := find(seq_id)) is not None:
                    time = sample.request.notes[self]
                    time.computed(cost.busy_ns, result.end_ns, owed_ns, device)
        for draft in drafts:
            if (sample := find(draft.seq_id)) is not None:
                owed_ns = draft.num_tokens * cost.price_ns
                sample.request.notes[self].computed(0, 0, owed_ns, device)
        for seq_id in self._fresh.intersection(result.seq_ids):
            if (sample := find(seq_id)) is not None:
                self._fresh.remove(seq_id)
                sample.request.notes[self].token(sample.index, result.end_ns, step.now_ns)

    def finished(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        self._fresh.discard(sample.seq_id)
        end_ns = sample.request.step_end_ns
        sample.request.notes[self].ended(sample.index, end_ns, deliveries.now_ns)

    def stopped(self, sample: Sample) -> None:
        self._fresh.discard(sample.seq_id)
        if sample.retracted:
            sample.request.notes[self].left(sample.index, "weights", self._now_ns)

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        now_ns, served = ending.now_ns, False
        if request is not None:
            time = request.notes[self]
            served = bool(request.samples) and not request.executed_ns
        else:
            assert cancel is not None
            time = self._unbegun.pop(cancel.key, None)
            time = time or RequestTime.ended_by_admission(cancel, now_ns)
        ending.usage["time"] = time.finish(now_ns, served=served)
        ending.usage["billed_ns"] = time.billed_ns
        ending.timings["published_ns"] = time.start_ns

    def dropped(self, request: RequestState) -> None:
        """Take back the bill of a request that ends elsewhere: this account bills none of it."""
        self.unbill(request.notes[self].settle())

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        if chunks:
            self.dropped(before)
            request.notes[self] = RequestTime.restored(request, _before(request), now_ns)
        else:
            request.notes[self] = before.notes[self]

    def reset(self, requests: Sequence[RequestState]) -> None:
        """Begin an epoch. The time from the last step on belongs to the failure."""
        failed_ns = max((device.at_ns for device in self._devices.values()), default=0)
        self._unbegun.clear()
        for request in requests:
            request.notes[self].failed(failed_ns, self._now_ns)
            if not request.samples:
                self._unbegun[request.key] = request.notes[self]
        self._busy_ns, self._billed_ns = self.busy_ns, self.billed_ns
        self._devices.clear()
        self._fresh.clear()


def _before(request: RequestState) -> RequestTimes:
    return RequestTimes.find(request.info.parts) or RequestTimes()


def shares(prefills: Sequence[tuple[int, int]], price_ns: int) -> Iterable[tuple[int, int]]:
    """Return (sequence, what it owes) for each of a step's rows with prompts.

    A row and the rows without tokens after it share its prefill: each owes the same, and the first
    one the remainder.
    """
    owed = [(seq_id, number * price_ns) for seq_id, number in prefills]
    if all(map(itemgetter(1), prefills)):
        return owed
    firsts = [place for place, (_, number) in enumerate(prefills) if number or not place]
    for first, end in pairwise([*firsts, len(prefills)]):
        part_ns = owed[first][1] // (end - first)
        for place in range(first + 1, end):
            owed[place] = (owed[place][0], part_ns)
        owed[first] = (owed[first][0], owed[first][1] - part_ns * (end - first - 1))
    return owed

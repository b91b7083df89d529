"""Accounts of time: what a replica's device did, the life of each request by cause, and its bill.

A step adds to totals of its device, whatever its number of rows. A request takes differences of
these totals where its state changes: it starts, has a first token, is preempted, ends. Both move a
cursor that never goes back, and give the time since the cursor to one cause. So causes add up to a
request's life, and bills with the unbilled time to the device's busy time, exactly. docs/time.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal, NamedTuple

from ...bus.messages import RequestOpened, StartedSequence, StepResult
from ...bus.times import CAUSES, Break, Cause, StepTimes

MOST_MARKS = 8192
"""Instants of a device that are remembered. Of the older half, every other one is then dropped, so
that the totals in between are interpolated."""

State = Literal["decode", "prefill", "ready", "ended"] | Cause
"""Of a sample or a request: computing, in batching's queue, ended, or a cause of its whole time."""

_RANKS: Final[dict[State, int]] = {"decode": 4, "prefill": 3, "kv": 2, "ended": -1}
"""Of several samples, the one with the largest rank says the cause; other states have 1."""


class Mark(NamedTuple):
    """Totals of a device at an instant.

    Attributes:
        at_ns: The instant.
        prefill_ns: Time of steps with prompt tokens.
        decode_ns: Time of other steps.
        weights_ns: Time in which no step was allowed, or weights and memory were changed.
        price_ns: What a sequence owes that has decoded from the beginning on.
    """

    at_ns: int
    prefill_ns: int
    decode_ns: int
    weights_ns: int
    price_ns: int


class StepCost(NamedTuple):
    """What a step took.

    Attributes:
        busy_ns: Time of the device.
        price_ns: Of each of its tokens.
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
        busy_ns: Time of all steps.
        billed_ns: The part that requests owe.
        num_decoding: Sequences that compute a token in each step, or in each round of stages.
    """

    def __init__(self) -> None:
        self.at_ns = self.busy_ns = self.billed_ns = self.num_decoding = 0
        self._prefill_ns = self._decode_ns = self._weights_ns = self._price_ns = 0
        self._rest_ns = self._shared_rest_ns = 0
        # Fields of Mark; a tuple is made faster.
        self._marks: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]

    def step(self, times: StepTimes, start_ns: int, end_ns: int, num_drafted: int = 0) -> StepCost:
        """Add a step.

        Args:
            times: Its times.
            start_ns: Its start.
            end_ns: Its end.
            num_drafted: Drafted tokens that it verified.
        """
        if times.held_ns is not None:
            self._hold(times.held_ns[0], min(times.held_ns[1], start_ns))
        if times.changed_ns:
            self._hold(start_ns, times.changed_ns)
        at_ns, marks, busy_ns, price_ns = self.at_ns, self._marks, 0, 0
        if start_ns > at_ns:
            at_ns = start_ns
            marks.append((at_ns, *marks[-1][1:]))
        self.at_ns = end_ns = max(end_ns, at_ns)
        if num_tokens := times.num_tokens:
            busy_ns = end_ns - at_ns
            self.busy_ns += busy_ns
            price_ns, self._rest_ns = divmod(busy_ns + self._rest_ns, num_tokens)
            num_decodes = num_tokens - num_drafted
            if times.prefills:
                self._prefill_ns += busy_ns
                num_decodes -= sum(number for _, number in times.prefills)
            else:
                self._decode_ns += busy_ns
            if num_decoding := self.num_decoding:
                each_ns = price_ns
                if num_decodes < num_decoding:
                    each_ns, self._shared_rest_ns = divmod(
                        price_ns * num_decodes + self._shared_rest_ns, num_decoding
                    )
                self._price_ns += each_ns
                self.billed_ns += each_ns * num_decoding
        totals_ns = self._prefill_ns, self._decode_ns, self._weights_ns, self._price_ns
        marks.append((end_ns, *totals_ns))
        if len(marks) > MOST_MARKS:
            del marks[1 : MOST_MARKS // 2 : 2]
        return StepCost(busy_ns, price_ns)

    def totals(self, at_ns: int) -> Mark:
        """Return the totals at an instant; behind the last step, those at its end."""
        marks = self._marks
        if at_ns >= marks[-1][0]:
            return Mark(*marks[-1])
        index = bisect_right(marks, at_ns, key=itemgetter(0))
        before, after = marks[max(index - 1, 0)], marks[index]
        part, span = max(at_ns - before[0], 0), max(after[0] - before[0], 1)
        pairs = zip(before, after, strict=True)
        return Mark(*(first + (last - first) * part // span for first, last in pairs))

    def join(self, at_ns: int) -> int:
        """Let a sequence decode from then on; return the price at which it begins."""
        price_ns = self.totals(at_ns).price_ns
        self.num_decoding += 1
        self.billed_ns += self._price_ns - price_ns
        return price_ns

    def leave(self, at_ns: int, begun_ns: int) -> int:
        """Let a sequence decode no more; return what it owes since `join`, which returned
        `begun_ns`."""
        price_ns = max(self.totals(at_ns).price_ns, begun_ns)
        self.num_decoding -= 1
        self.billed_ns -= self._price_ns - price_ns
        return price_ns - begun_ns

    def _hold(self, since_ns: int, until_ns: int) -> None:
        """Add time in which no step could run."""
        since_ns = max(since_ns, self.at_ns)
        if until_ns <= since_ns:
            return
        last = Mark(*self._marks[-1])
        self._weights_ns += until_ns - since_ns
        self._marks.append(last._replace(at_ns=since_ns))
        self._marks.append(last._replace(at_ns=until_ns, weights_ns=self._weights_ns))
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
    # While no sample has begun: the state, and batching's replica if it is "ready".
    _base: State = "credits"
    _base_device: DeviceTime | None = None
    _samples: dict[int, _SampleTime] = field(default_factory=dict)
    # Time of steps since the cursor with tokens of its prompt; the end of the last one.
    _own_ns: int = 0
    _own_end_ns: int = 0

    @classmethod
    def opened(cls, opened: RequestOpened, now_ns: int) -> RequestTime:
        """Return the account of a request that enters the lane."""
        # For a request with a budget, `received_ns` is its publication.
        taken_ns, down_since_ns = opened.received_ns + opened.waited_ns, opened.down_since_ns
        start_ns = taken_ns - opened.queued_ns
        time = cls(opened.n, start_ns, start_ns)
        time._advance(taken_ns, now_ns, "queue")
        time._advance(opened.admitted_ns, now_ns, "overhead")
        if opened.response is not None:
            time._base = "delivery"
        if down_since_ns:
            time._advance(down_since_ns, now_ns)
            time._base = "recovery"
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
            if all(each.state == "ended" for each in self._samples.values()):
                self._dispatched(started, device, now_ns)
            self._advance(started.executed_ns, now_ns)
            sample = _SampleTime("prefill", device)
            self._samples[started.sample_index] = sample
        elif sample.state != "ended":
            self._bill(sample, device.at_ns)
            self._advance(started.executed_ns, now_ns)
            sample.device = device
            # What it has to compute again belongs to the break.
            num_remaining = num_prompt + started.num_generated - started.num_cached
            if started.num_generated and num_remaining <= 1:
                sample.state = "decode"
        sample.hands_over = started.hands_over

    def computed(self, busy_ns: int, end_ns: int, billed_ns: int, device: DeviceTime) -> None:
        """Note a step that computed tokens of the prompt, or again after a break."""
        if end_ns != self._own_end_ns:
            self._own_ns += busy_ns
            self._own_end_ns = end_ns
        self.charge(billed_ns, device)

    def charge(self, billed_ns: int, device: DeviceTime) -> None:
        """Add to the bill."""
        self.billed_ns += billed_ns
        device.billed_ns += billed_ns

    def token(self, index: int, end_ns: int, now_ns: int) -> None:
        """Note a sample's first token since it started, at the end of a step."""
        sample = self._samples[index]
        self._advance(end_ns, now_ns)
        sample.state = "kv" if sample.hands_over else "decode"
        if not sample.hands_over:
            sample.begun_ns = sample.device.join(end_ns)

    def left(self, index: int, why: Break, now_ns: int) -> None:
        """Note that a sample has left the batch at the end of its device's last step."""
        sample = self._samples[index]
        self._leave(sample, sample.device.at_ns, now_ns)
        sample.state = why

    def ended(self, index: int, end_ns: int, now_ns: int) -> None:
        """Note that a sample has ended, with a step that ended then."""
        sample = self._samples.get(index)
        if sample is not None and sample.state != "ended":
            self._leave(sample, end_ns, now_ns)
            sample.state = "ended"

    def failed(self, at_ns: int, now_ns: int) -> None:
        """Note that the lane has failed; its last step ended then."""
        for sample in self._samples.values():
            if sample.state != "ended":
                self._leave(sample, at_ns, now_ns)
                sample.state = "recovery"
        self._advance(at_ns, now_ns)
        self._base, self._base_device, self._own_ns = "recovery", None, 0

    def finish(self, now_ns: int) -> dict[str, int]:
        """End the life; return its causes, in order, without those of 0."""
        cut_short = False
        for sample in self._samples.values():
            if sample.state in ("decode", "prefill"):
                self._leave(sample, sample.device.at_ns, now_ns)
                sample.state, cut_short = "ended", True
        self._advance(now_ns, now_ns, "delivery" if cut_short else self._top()[0])
        return {cause: self.causes[cause] for cause in CAUSES if self.causes.get(cause)}

    def settle(self) -> int:
        """Return the bill of a request that is dropped."""
        for sample in self._samples.values():
            self._bill(sample, sample.device.at_ns)
        return self.billed_ns

    def _dispatched(self, started: StartedSequence, device: DeviceTime, now_ns: int) -> None:
        """Note when fairness and batching had the first sequence that begins."""
        if (queued := started.queued) is not None:
            base: State = "overhead" if self._base == "credits" else self._base
            self._advance(queued.start_ns, now_ns, base if not self._samples else "credits")
            self._advance(queued.end_ns, now_ns, "credits")
        self._base, self._base_device = "ready", device
        if started.fetching_since_ns:
            self._advance(started.fetching_since_ns, now_ns)
            self._base = "kv"
        self._advance(started.executed_ns, now_ns)
        self._base = "credits"

    def _leave(self, sample: _SampleTime, at_ns: int, now_ns: int) -> None:
        self._advance(at_ns, now_ns)
        self._bill(sample, at_ns)

    def _bill(self, sample: _SampleTime, at_ns: int) -> None:
        if sample.begun_ns is not None:
            self.billed_ns += sample.device.leave(at_ns, sample.begun_ns)
            sample.begun_ns = None

    def _top(self) -> tuple[State, DeviceTime | None]:
        """Return the state that counts, and its device."""
        running = [each for each in self._samples.values() if each.state != "ended"]
        if running:
            first = max(running, key=lambda each: _RANKS.get(each.state, 1))
            return first.state, first.device
        return ("delivery" if len(self._samples) == self.n else self._base), self._base_device

    def _advance(self, to_ns: int, now_ns: int, cause: State | None = None) -> None:
        """Give the time until an instant to a cause; by the state of the request if it is None."""
        since_ns = self.cursor_ns
        self.cursor_ns = to_ns = max(since_ns, min(to_ns, now_ns))
        if to_ns == since_ns:
            return
        own_ns, self._own_ns = self._own_ns, 0
        state, device = (cause, None) if cause is not None else self._top()
        if device is None or state not in ("decode", "prefill", "ready"):
            self._add(state, to_ns - since_ns)
            return
        rest_ns = to_ns - since_ns
        before, after = device.totals(since_ns), device.totals(to_ns)
        rest_ns -= (prefill_ns := min(after.prefill_ns - before.prefill_ns, rest_ns))
        rest_ns -= (decode_ns := min(after.decode_ns - before.decode_ns, rest_ns))
        rest_ns -= (weights_ns := min(after.weights_ns - before.weights_ns, rest_ns))
        if state == "decode":
            self._add("own_decode", prefill_ns + decode_ns)
        else:
            own_ns = min(own_ns, prefill_ns) if state == "prefill" else 0
            self._add("own_prefill", own_ns)
            self._add("others_prefill", prefill_ns - own_ns)
            self._add("others_decode", decode_ns)
        self._add("weights", weights_ns)
        self._add("overhead", rest_ns)

    def _add(self, cause: State, passed_ns: int) -> None:
        assert cause in CAUSES, "a state is no cause"
        self.causes[cause] = self.causes.get(cause, 0) + passed_ns


class TimeAccounts:
    """The accounts of all requests in flight, and of each replica's device."""

    def __init__(self) -> None:
        self._devices: defaultdict[int, DeviceTime] = defaultdict(DeviceTime)
        # Running sequences, with the index of the sample; those without a token since they started.
        self._running: dict[int, tuple[RequestTime, int]] = {}
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

    def open(self, opened: RequestOpened, now_ns: int) -> RequestTime:
        """Return the account of a request that enters the lane, perhaps again."""
        time = self._unbegun.pop(opened.entry_id, None)
        return time or RequestTime.opened(opened, now_ns)

    def pop_unbegun(self, entry_id: str) -> RequestTime | None:
        """Return the account of a request that had not begun when an epoch ended, and won't."""
        return self._unbegun.pop(entry_id, None)

    def reset(self, unbegun: Mapping[str, RequestTime], begun: Iterable[RequestTime]) -> None:
        """Begin an epoch. The time from the last step on belongs to the failure.

        Args:
            unbegun: Accounts of requests that have not begun, by entry.
            begun: Of other requests.
        """
        failed_ns = max((device.at_ns for device in self._devices.values()), default=0)
        for time in (*unbegun.values(), *begun):
            time.failed(failed_ns, self._now_ns)
        self._unbegun = dict(unbegun)
        self._busy_ns, self._billed_ns = self.busy_ns, self.billed_ns
        self._devices.clear()
        self._running.clear()
        self._fresh.clear()

    def step(self, result: StepResult, replica: int, now_ns: int) -> StepCost:
        """Add a step to its device, and note sequences that left before."""
        times, drafts, self._now_ns = result.times, result.drafts, now_ns
        for seq_id, why in times.left:
            if (running := self._running.pop(seq_id, None)) is not None:
                running[0].left(running[1], why, now_ns)
        drafted = sum([draft.num_tokens for draft in drafts]) if drafts else 0
        return self._devices[replica].step(times, result.start_ns, result.end_ns, drafted)

    def started(
        self,
        time: RequestTime,
        started: StartedSequence,
        num_prompt: int,
        replica: int,
        now_ns: int,
    ) -> None:
        """As `RequestTime.started`."""
        time.started(started, num_prompt, self._devices[replica], now_ns)
        self._running[started.seq_id] = time, started.sample_index
        self._fresh.add(started.seq_id)

    def count(self, result: StepResult, replica: int, cost: StepCost, now_ns: int) -> None:
        """Account for a step's rows that compute prompts, drafted tokens, and first tokens."""
        if not (result.times.prefills or self._fresh or result.drafts):
            return
        device, end_ns, find = self._devices[replica], result.end_ns, self._running.get
        for seq_id, owed_ns in shares(result.times.prefills, cost.price_ns):
            if (running := find(seq_id)) is not None:
                running[0].computed(cost.busy_ns, end_ns, owed_ns, device)
        for draft in result.drafts:
            if (running := find(draft.seq_id)) is not None:
                running[0].charge(draft.num_tokens * cost.price_ns, device)
        for seq_id in self._fresh.intersection(result.seq_ids):
            self._fresh.remove(seq_id)
            if (running := find(seq_id)) is not None:
                running[0].token(running[1], end_ns, now_ns)

    def ended(self, seq_id: int, end_ns: int, now_ns: int) -> None:
        """Note that a sequence has ended, with a step that ended then."""
        if (running := self._running.get(seq_id)) is not None:
            running[0].ended(running[1], end_ns, now_ns)
        self.forget(seq_id)

    def drop(self, time: RequestTime | None) -> None:
        """Forget a request that ends elsewhere: here, nobody pays for it."""
        if time is not None:
            self._billed_ns -= time.settle()

    def forget(self, seq_id: int) -> None:
        """Drop a sequence, whose request ends."""
        self._running.pop(seq_id, None)
        self._fresh.discard(seq_id)


def shares(prefills: Iterable[tuple[int, int]], price_ns: int) -> Iterator[tuple[int, int]]:
    """Yield (sequence, what it owes) of a step's rows with prompts.

    A row and the rows without tokens behind it share its prefill: each owes the same, and the first
    one the remainder.
    """
    group: list[int] = []
    total_ns = 0
    for seq_id, number in (*prefills, (-1, -1)):
        if number and group:
            part_ns = total_ns // len(group)
            yield group[0], total_ns - part_ns * (len(group) - 1)
            yield from ((sharer, part_ns) for sharer in group[1:])
            group = []
        group.append(seq_id)
        if number:
            total_ns = number * price_ns

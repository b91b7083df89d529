"""Metrics and spans of the streaming stage."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ...bus.entries import entry_key
from ...bus.messages import RequestOpened
from ...bus.parts.responses import ResponseCaching
from ...bus.public import Usage
from ...bus.times import CAUSES
from ...telemetry import (
    PROVIDER,
    Labels,
    Metrics,
    TraceContext,
    instruments,
    names,
    operation_of,
    priority_label,
    usage_attributes,
)
from ..actor import Actor
from .deliveries import EndedRequest

_SPARE_SEQUENCES = 256
"""Ended sequences that `TokenIntervals` may hold besides a step's before it drops them."""

_MOST_TENANTS, _OTHER_TENANTS = 100, "others"
"""Further tenants have one label, since clients can name any number of them."""

_SHORTEST_WINDOW_NS = 500_000_000
"""`Throughput` measures no rate over a shorter time."""


class TokenIntervals:
    """Time between two tokens of a sample.

    Nearly all sequences of a step were in the step before, so there are few distinct intervals.
    Each is returned once per step, however many sequences have it: a step costs microseconds.
    """

    def __init__(self) -> None:
        self._last_ns: dict[int, int] = {}

    def step(self, seq_ids: Sequence[int], end_ns: int) -> list[int]:
        """Add the sequences that sampled in a step.

        Returns:
            The distinct times since their last tokens, in nanoseconds; none for first tokens.
        """
        before = set(map(self._last_ns.get, seq_ids)) - {None}
        now = dict.fromkeys(seq_ids, end_ns)
        if len(self._last_ns) > 2 * len(seq_ids) + _SPARE_SEQUENCES:
            self._last_ns = now
        else:
            self._last_ns.update(now)
        return sorted(end_ns - last_ns for last_ns in before if last_ns is not None)

    def clear(self) -> None:
        """Begin a new epoch, in which sequence ids start again."""
        self._last_ns.clear()


_SHOWN_VERSIONS = 4
"""Versions of the weights whose tokens are reported."""


class Throughput:
    """Tokens per second, also of each version of the weights, and the time to the first token of
    the last 100 requests.

    Attributes:
        version_tokens: Tokens that the weights in place have sampled.
    """

    def __init__(self, now_ns: int) -> None:
        self._tokens = self.version_tokens = 0
        self._version = -1
        self._version_since_ns = now_ns
        # Version, tokens, and nanoseconds of former weights, the newest last.
        self._former: deque[tuple[int, int, int]] = deque(maxlen=_SHOWN_VERSIONS - 1)
        self._since_ns = now_ns
        self._rate = 0
        self._last_ns = 0
        self._ttft_ns: deque[int] = deque(maxlen=100)

    def add(self, tokens: int, now_ns: int, version: int = 0) -> None:
        """Count new tokens of a version of the weights."""
        if version != self._version:
            self._change(version, now_ns)
        self._tokens += tokens
        self.version_tokens += tokens
        self._last_ns = now_ns

    def _change(self, version: int, now_ns: int) -> None:
        passed_ns = now_ns - self._version_since_ns
        if self._version >= 0:
            self._former.append((self._version, self.version_tokens, passed_ns))
        self._version, self._version_since_ns, self.version_tokens = version, now_ns, 0

    def _versions(self, now_ns: int) -> str:
        """Return the tokens of the newest versions, and per second, as "3: 1200 (810/s)"."""
        present = (self._version, self.version_tokens, now_ns - self._version_since_ns)
        return ", ".join(
            f"{version}: {tokens} ({tokens / max(passed_ns, 1) * 1e9:.0f}/s)"
            for version, tokens, passed_ns in (present, *reversed(self._former))
        )

    def first_token(self, ttft_ns: int) -> None:
        """Add the time to the first token of a request that has ended."""
        self._ttft_ns.append(ttft_ns)

    def load(self, now_ns: int) -> dict[str, int | float | str]:
        """Return tokens per second since the last call; once there is one, the age of the last
        token, and median and 95th percentile of the time to the first; once the weights have
        changed, the tokens of each version."""
        passed_ns = now_ns - self._since_ns
        if passed_ns >= _SHORTEST_WINDOW_NS:
            self._rate = round(self._tokens / (passed_ns / 1e9))
            self._tokens, self._since_ns = 0, now_ns
        load: dict[str, int | float | str] = {"tokens_per_s": self._rate}
        if self._former:
            load["tokens_by_version"] = self._versions(now_ns)
        if self._last_ns:
            load["token_age_s"] = round((now_ns - self._last_ns) / 1e9, 1)
        if times := sorted(self._ttft_ns):
            for name, share in (("ttft_ms_p50", 0.5), ("ttft_ms_p95", 0.95)):
                load[name] = round(times[int(share * (len(times) - 1))] / 1e6, 1)
        return load


class RequestTimes:
    """Times of ended requests by cause, and their bills, by tenant."""

    def __init__(self) -> None:
        self._times_ns: Counter[tuple[str, str]] = Counter()
        self._bills_ns: Counter[str] = Counter()
        self._tenants: set[str] = set()
        self._last: deque[dict[str, int]] = deque(maxlen=100)

    def add(self, tenant: str, usage: Usage) -> None:
        """Add a request for `take`, unless its time is unknown."""
        if usage.time is None:
            return
        if len(self._tenants) < _MOST_TENANTS:
            self._tenants.add(tenant)
        tenant = tenant if tenant in self._tenants else _OTHER_TENANTS
        for cause, passed_ns in usage.time.items():
            self._times_ns[tenant, cause] += passed_ns
        self._bills_ns[tenant] += usage.billed_ns or 0

    def add_last(self, usage: Usage) -> None:
        """Add a request for `load`."""
        if usage.time is not None:
            self._last.append(usage.time)

    def take(self) -> Iterator[tuple[instruments.Instrument, float, Labels]]:
        """Iterate over the measurements since the last call."""
        times, self._times_ns = self._times_ns, Counter()
        bills, self._bills_ns = self._bills_ns, Counter()
        for (tenant, cause), passed_ns in times.items():
            labels = {names.TENANT: tenant, names.TIME_CAUSE: cause}
            yield instruments.REQUEST_TIME, passed_ns / 1e9, labels
        for tenant, billed_ns in bills.items():
            yield instruments.STEP_BILLED, billed_ns / 1e9, {names.TENANT: tenant}

    def load(self) -> dict[str, int]:
        """Return each cause's share of the time of the last hundred requests, in thousandths."""
        total: Counter[str] = Counter()
        for time in self._last:
            total.update(time)
        whole = total.total()
        shares = {cause: round(1000 * total[cause] / whole) for cause in CAUSES if total[cause]}
        return {f"time_{cause}": share for cause, share in shares.items()}


def measure_end(metrics: Metrics, ended: EndedRequest, weight_version: int) -> None:
    """Record how a request ended and the durations of its phases.

    Args:
        metrics: Destination.
        ended: The request.
        weight_version: Version of the current weights.
    """
    completion, record = ended.completion, metrics.record
    code = completion.error.code if completion.error else ""
    outcome = {names.STATUS: completion.status, names.ERROR_TYPE: code}
    record(instruments.REQUESTS, 1, outcome)
    if ended.opened is None:
        return
    metrics.ended(completion)
    timings, usage = completion.timings, completion.usage
    labels = _operation(ended.opened)
    duration_s = _seconds(timings.received_ns, timings.finished_ns)
    record(instruments.REQUEST_DURATION, duration_s, {**labels, names.ERROR_TYPE: code})
    for kind, number in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
        record(instruments.TOKEN_USAGE, number, {**labels, names.TOKEN_TYPE: kind})
    if timings.first_token_ns:
        for sample in completion.samples:
            record(instruments.WEIGHT_STALENESS, weight_version - sample.weight_version)
    if not ended.restored:
        _measure_phases(metrics, ended, ended.opened, labels)


def _operation(opened: RequestOpened) -> dict[str, str]:
    """Return the operation of a request, by OpenTelemetry's conventions."""
    return {
        names.OPERATION: operation_of(embeds=opened.embeds, is_chat=opened.is_chat),
        names.PROVIDER: PROVIDER,
        names.REQUEST_MODEL: opened.model,
    }


def _measure_phases(
    metrics: Metrics, ended: EndedRequest, opened: RequestOpened, labels: Labels
) -> None:
    """Record the times to the first step, to the first token and to the last."""
    completion, record = ended.completion, metrics.record
    timings = completion.timings
    executor, streaming = timings.of("executor"), timings.of("streaming")
    if executor is None:
        return  # from the response cache
    priority = {names.PRIORITY: priority_label(opened.priority)}
    record(instruments.QUEUE_DURATION, _seconds(timings.received_ns, executor.start_ns), priority)
    if streaming is None:
        return
    record(instruments.PREFILL_DURATION, _seconds(executor.start_ns, streaming.start_ns), priority)
    if opened.embeds:
        return
    record(instruments.DECODE_DURATION, _seconds(streaming.start_ns, executor.end_ns), priority)
    ttft_s = _seconds(timings.received_ns, timings.first_token_ns)
    record(instruments.TIME_TO_FIRST_TOKEN, ttft_s, {**labels, **priority})
    # The samples of a request run side by side, so the longest one takes the time.
    further = max(len(sample.token_ids) for sample in completion.samples) - 1
    if further > 0:
        last_ns = ended.last_token_ns or timings.finished_ns
        flow_s = _seconds(timings.first_token_ns, last_ns)
        record(instruments.TIME_PER_OUTPUT_TOKEN, flow_s / further, labels)


def _seconds(start_ns: int, end_ns: int) -> float:
    """Return a duration; at least 0, since the clocks of two hosts may differ."""
    return max(0, end_ns - start_ns) / 1e9


def _cache_result(opened: RequestOpened) -> dict[str, str]:
    """Return whether a request that can be cached was served from the response cache."""
    if (caching := ResponseCaching.find(opened.parts)) is None:
        return {}
    if caching.response is not None:
        return {names.RESPONSE_RESULT: "hit"}
    return {names.RESPONSE_RESULT: "miss"} if caching.generation else {}


def _begins_trace(stage: Actor, opened: RequestOpened) -> bool:
    """Return whether admission began the request's trace, so that no client's span has the
    operation."""
    if not stage.bus.durable:
        return False
    begun = stage.first_context(entry_key(opened.entry_id, opened.request_id))
    return begun.trace_id == TraceContext(opened.traceparent).trace_id


def trace_end(stage: Actor, ended: EndedRequest) -> None:
    """Make the stage's span of a request that has ended."""
    opened, completion = ended.opened, ended.completion
    if opened is None or not stage.records(opened.traceparent):
        return
    timings = completion.timings
    held = timings.of(stage.name)
    events: tuple[tuple[str, int], ...] = ()
    if timings.first_token_ns:
        events = ((names.FIRST_TOKEN, timings.first_token_ns),)
    if completion.status == "cancelled":
        events += ((names.CANCELLED, timings.finished_ns),)
    stage.span(
        opened.request_id,
        TraceContext(opened.traceparent, opened.tracestate),
        held.start_ns if held else timings.finished_ns,
        {
            **(_operation(opened) if _begins_trace(stage, opened) else {}),
            **usage_attributes(completion),
            names.STATUS: completion.status,
            **_cache_result(opened),
            **names.time_attributes(completion.usage.time, completion.usage.billed_ns),
        },
        events=events,
        error=completion.error.code if completion.error else "",
    )

"""What is measured of a request that has ended."""

from __future__ import annotations

from ...bus.messages import RequestOpened
from ...telemetry import Labels, Metrics, instruments, names, priority_label
from .core import EndedRequest


def measure_end(metrics: Metrics, ended: EndedRequest, weight_version: int) -> None:
    """Records how a request ended and where its time went.

    Args:
        metrics: Where to.
        ended: Just now.
        weight_version: Of the weights that make tokens now.
    """
    completion, record = ended.completion, metrics.record
    code = completion.error.code if completion.error else ""
    outcome = {names.STATUS: completion.status, names.ERROR_TYPE: code}
    record(instruments.REQUESTS, 1, outcome)
    if ended.info is None:
        return
    timings, usage = completion.timings, completion.usage
    labels = {
        names.OPERATION: operation_of(ended.info),
        names.PROVIDER: "nano-inference",
        names.REQUEST_MODEL: ended.info.model,
    }
    duration_s = _seconds(timings.received_ns, timings.finished_ns)
    record(instruments.REQUEST_DURATION, duration_s, {**labels, names.ERROR_TYPE: code})
    for kind, number in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
        record(instruments.TOKEN_USAGE, number, {**labels, names.TOKEN_TYPE: kind})
    if timings.first_token_ns:
        for sample in completion.samples:
            record(instruments.WEIGHT_STALENESS, weight_version - sample.weight_version)
    if not ended.restored:
        _measure_phases(metrics, ended, labels)


def operation_of(info: RequestOpened) -> str:
    """What a request asked for, in OpenTelemetry's words."""
    return "embeddings" if info.embeds else "text_completion"


def _measure_phases(metrics: Metrics, ended: EndedRequest, labels: Labels) -> None:
    """Until the first step, until the first token, until the last."""
    assert ended.info is not None
    completion, record = ended.completion, metrics.record
    timings = completion.timings
    executor, streaming = timings.of("executor"), timings.of("streaming")
    assert executor is not None, "it is known from its first step on"
    priority = {names.PRIORITY: priority_label(ended.info.priority)}
    record(instruments.QUEUE_DURATION, _seconds(timings.received_ns, executor.start_ns), priority)
    if streaming is None:
        return
    prefill_s = _seconds(executor.start_ns, streaming.start_ns)
    record(instruments.PREFILL_DURATION, prefill_s, priority)
    if ended.info.embeds:
        return
    record(instruments.DECODE_DURATION, _seconds(streaming.start_ns, executor.end_ns), priority)
    ttft_s = _seconds(timings.received_ns, timings.first_token_ns)
    record(instruments.TIME_TO_FIRST_TOKEN, ttft_s, {**labels, **priority})
    # The samples of a request flow side by side, so its longest one takes the time.
    further = max(len(sample.token_ids) for sample in completion.samples) - 1
    if further > 0:
        last_ns = ended.last_token_ns or timings.finished_ns
        flow_s = _seconds(timings.first_token_ns, last_ns)
        record(instruments.TIME_PER_OUTPUT_TOKEN, flow_s / further, labels)


def _seconds(start_ns: int, end_ns: int) -> float:
    """Never less than nothing where the clocks of two hosts differ."""
    return max(0, end_ns - start_ns) / 1e9

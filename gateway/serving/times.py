"""A request's time at the gateway, in addition to that in the pipeline (docs/time.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...bus.public import Completion
from ...bus.times import CAUSES
from ...telemetry import now_ns
from ..call import Account


def with_http(completion: Completion, account: Account) -> Completion:
    """Return a terminal message that has come now, with the time since the call's first byte.

    What is not the pipeline's is `http` before it and `delivery` after. If the clocks of two hosts
    make the pipeline's time longer than the call, the difference is taken from the queue, then from
    other causes.

    Args:
        completion: The terminal message.
        account: Account of the call.
    """
    time, now, arrived_ns = completion.usage.time, now_ns(), account.arrived_ns
    account.unread_before_ns = account.unread_ns()
    if time is None or not arrived_ns:
        return completion
    passed_ns, time = max(0, now - arrived_ns), dict(time)
    for cause in ("queue", *CAUSES):
        surplus_ns = sum(time.values()) - passed_ns
        if surplus_ns > 0 and cause in time:
            time[cause] -= min(time[cause], surplus_ns)
    rest_ns = passed_ns - sum(time.values())
    behind_ns = min(rest_ns, max(0, now - completion.timings.finished_ns))
    time["http"] = rest_ns - behind_ns
    time["delivery"] = time.get("delivery", 0) + behind_ns
    usage = msgspec.structs.replace(completion.usage, time=_ordered(time))
    return msgspec.structs.replace(completion, usage=usage)


def time_usage(completions: Iterable[Completion], account: Account | None = None) -> dict[str, Any]:
    """Return the fields of an answer's usage with its time and its bill; {} if they are unknown.

    Of several prompts, the time is that of the one that took longest.

    Args:
        completions: The terminal messages.
        account: Account of the call. In a stream, the time since the terminal message went into
            writing the rest, or into waiting until the client had read.
    """
    usages = [completion.usage for completion in completions]
    times = [usage.time for usage in usages if usage.time is not None]
    if not times or len(times) < len(usages):
        return {}
    time = max(times, key=lambda each: sum(each.values()))
    if account is not None:
        time = _until_now(time, account)
    return {"time": time, "billed_ns": sum(usage.billed_ns or 0 for usage in usages)}


def call_usage(account: Account) -> dict[str, Any]:
    """Return `time_usage` of all requests of a call; {} before they have ended."""
    if account.left or not account.time:
        return {}
    return {"time": _until_now(account.time, account), "billed_ns": account.billed_ns}


def _until_now(time: dict[str, int], account: Account) -> dict[str, int]:
    """Add what has passed since the terminal message."""
    if not account.arrived_ns:
        return time
    passed_ns = max(0, now_ns() - account.arrived_ns - sum(time.values()))
    unread_ns = min(passed_ns, account.unread_ns() - account.unread_before_ns)
    written_ns = time.get("delivery", 0) + passed_ns - unread_ns
    return _ordered(time | {"delivery": written_ns, "slow_client": unread_ns})


def _ordered(time: dict[str, int]) -> dict[str, int]:
    return {cause: time[cause] for cause in CAUSES if time.get(cause)}

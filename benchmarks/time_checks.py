"""Checks that time adds up (docs/time.md): for programs that run requests under faults.

wrong = wrong_times(completions)             # of any lanes and gateways' buses, at any time
wrong += wrong_bills(reports, completions)   # of one lane, while no request is in flight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from nano_inference.bus.public import Completion
from nano_inference.bus.times import CAUSES
from nano_inference.store.board import StageReport

Terminal = Completion | Mapping[str, Any]
"""A terminal message, or its JSON."""


def wrong_times(completions: Iterable[Terminal]) -> list[str]:
    """Return a sentence for each request whose causes don't add up to its time, to the nanosecond.

    Args:
        completions: Terminal messages as pipelines write them; over HTTP, a gateway's time is
            added.
    """
    wrong = []
    for each in map(_completion, completions):
        time, timings, name = each.usage.time, each.timings, each.request_id or each.entry_id
        if time is None:
            code = each.error.code if each.error is not None else ""
            wrong.append(f"{name} ({each.status} {code}) has no time")
            continue
        residual_ns = timings.finished_ns - timings.published_ns - sum(time.values())
        if residual_ns:
            wrong.append(f"{name}: {residual_ns} ns have no cause: {time}")
        if unknown := {cause for cause, ns in time.items() if cause not in CAUSES or ns <= 0}:
            wrong.append(f"{name}: no cause, or of no time: {sorted(unknown)}")
        if (each.usage.billed_ns or 0) < 0:
            wrong.append(f"{name}: a bill of {each.usage.billed_ns} ns")
    return wrong


def wrong_bills(reports: Iterable[StageReport], completions: Iterable[Terminal]) -> list[str]:
    """Return a sentence for each way in which bills are not a lane's busy time.

    A killed streaming process takes its accounts along, so the bills are those of requests that
    have ended since its successor began, which owe it nothing for what ran before.

    Args:
        reports: Reports of one lane, while no request is in flight, and two seconds (a report)
            after its last one ended.
        completions: The terminal messages of all its requests.
    """
    loads = [each.load for each in reports if each.stage == "streaming" and "busy_ns" in each.load]
    if len(loads) != 1:
        return [f"{len(loads)} reports of streaming"]
    load = loads[0]
    since_ns, busy_ns, billed_ns = (
        int(load[name]) for name in ("accounts_since_ns", "busy_ns", "billed_ns")
    )
    found = map(_completion, completions)
    ended = [each for each in found if each.timings.finished_ns >= since_ns]
    owed_ns = sum(each.usage.billed_ns or 0 for each in ended)
    wrong = []
    if owed_ns != billed_ns:
        wrong.append(f"{len(ended)} requests owe {owed_ns} ns, the accounts have {billed_ns}")
    if billed_ns > busy_ns:
        wrong.append(f"{billed_ns} ns are billed, of {busy_ns} busy ones")
    return wrong


def unbilled_share(reports: Iterable[StageReport]) -> float:
    """Return the share of the busy time of lanes without a bill; 0 without any."""
    loads = [each.load for each in reports if each.stage == "streaming"]
    busy_ns = sum(int(load.get("busy_ns", 0)) for load in loads)
    billed_ns = sum(int(load.get("billed_ns", 0)) for load in loads)
    return 1 - billed_ns / busy_ns if busy_ns else 0.0


def _completion(each: Terminal) -> Completion:
    return each if isinstance(each, Completion) else msgspec.convert(dict(each), Completion)

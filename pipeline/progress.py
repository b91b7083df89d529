"""Whether lanes make progress with their requests, from the reports of their stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..config import split_role
from ..store.board import StageReport
from .health import LaneHealth

ProgressState = Literal["ok", "idle", "stalled"]


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of lanes.

    Attributes:
        status: "ok" if tokens or steps come; "idle" if nothing is in flight, or what is in flight
            has to wait; "stalled" if neither came for too long.
        token_age_s: Seconds since the last token; None before the first.
        step_age_s: Seconds for which a batch waits for its step, the longest of all replicas; None
            while there is no batch.
        in_flight: Requests taken and not yet answered.
        reason: Why a lane is stalled, or why its requests have to wait; "" for neither.
    """

    status: ProgressState
    in_flight: int = 0
    token_age_s: float | None = None
    step_age_s: float | None = None
    reason: str = ""


def progress_of(
    lanes: Iterable[LaneHealth], stall_timeout_s: float, host: str | None = None
) -> Progress:
    """Return the progress of these lanes together: stalled if one of them is.

    Args:
        lanes: Lanes, of any model.
        stall_timeout_s: Longest time without a token or a step, while requests are in flight.
        host: Only what the stages of this host are to blame for; None for all.
    """
    each = [(lane, _progress(lane, stall_timeout_s, host)) for lane in lanes]
    states = {found.status for _, found in each}
    status: ProgressState = "stalled" if "stalled" in states else "ok" if "ok" in states else "idle"
    reasons = [
        f"{_title(lane)}: {found.reason}"
        for lane, found in each
        if found.reason and found.status == status
    ]
    tokens = [found.token_age_s for _, found in each if found.token_age_s is not None]
    steps = [found.step_age_s for _, found in each if found.step_age_s is not None]
    return Progress(
        status=status,
        in_flight=sum(found.in_flight for _, found in each),
        token_age_s=min(tokens, default=None),
        step_age_s=max(steps, default=None),
        reason="; ".join(reasons),
    )


def _title(lane: LaneHealth) -> str:
    return f"lane {lane.lane} of model {lane.model}" if lane.model else f"lane {lane.lane}"


def _progress(lane: LaneHealth, stall_timeout_s: float, host: str | None) -> Progress:
    admission, streaming = lane.stages.get("admission"), lane.stages.get("streaming")
    batches = [
        report
        for role, report in lane.stages.items()
        if split_role(role)[0] == "batching" and host in (None, report.host)
    ]
    in_flight = int(admission.load.get("in_flight", 0)) if admission is not None else 0
    token_age_s = _age(streaming, "token_age_s")
    steps = {each.stage: age for each in batches if (age := _age(each, "step_age_s")) is not None}
    found = Progress(
        status="ok",
        in_flight=in_flight,
        token_age_s=token_age_s,
        step_age_s=max(steps.values(), default=None),
    )

    def idle(reason: str = "") -> Progress:
        return msgspec.structs.replace(found, status="idle", reason=reason)

    def stalled(why: str) -> Progress:
        reason = f"{why}; {lane.reason}" if lane.reason else why
        return msgspec.structs.replace(found, status="stalled", reason=reason)

    if not in_flight and (admission is not None or not steps):
        return idle()
    # A replica that is held or starts has no steps, and doesn't excuse another one that hangs.
    for name, age in steps.items():
        if age > stall_timeout_s:
            return stalled(f"no step of {name} has ended for {age:.0f} s")
    starting = [each.stage for each in lane.stages.values() if each.state == "starting"]
    held = [str(each.load["held"]) for each in batches if "held" in each.load]
    if starting or held:
        return idle(f"{starting[0]} is starting" if starting else held[0])
    # While all stages are ready, tokens follow steps.
    delivers = host is None or any(each.host == host for each in (admission, streaming) if each)
    if (steps and not lane.reason) or not delivers:
        return found
    signs = [age for age in (token_age_s, _age(admission, "busy_s")) if age is not None]
    if min(signs, default=float("inf")) <= stall_timeout_s:
        return found
    since = f" for {min(signs):.0f} s" if signs else ""
    return stalled(f"no token{since} with {in_flight} in flight")


def _age(report: StageReport | None, name: str) -> float | None:
    """Return an age from a report that has an age itself; None if it isn't there."""
    if report is None or not isinstance(age := report.load.get(name), int | float):
        return None
    return round(age + report.age_s, 1)

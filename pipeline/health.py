"""What the reports of the stages add up to: which lanes work, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..bus.links import MODEL_MANAGER
from ..config import REPLICATED, STAGES, all_roles, role_of, split_role
from ..store.board import StageReport

LATE_S = 5.0
"""A process reports every second. One that is later than this is very busy or has been killed; it
may still be heard of again."""


class LaneHealth(msgspec.Struct, frozen=True):
    """One lane.

    Attributes:
        lane: Its name.
        epoch: The newest that one of its stages has heard of.
        reason: Why it serves no requests; "" when it does. One replica is enough for that.
        stages: For each role the report of the process that was heard of last.
        rivals: Stages that more than one process runs, while there shall be one of each.
        model: Which model it serves, in a deployment of several.
    """

    lane: str
    epoch: int
    reason: str
    stages: dict[str, StageReport]
    rivals: tuple[str, ...] = ()
    model: str = ""

    @property
    def ready(self) -> bool:
        """Whether it serves requests: stages and at least one replica take part in one epoch."""
        return not self.reason


def lanes_of(reports: Iterable[StageReport]) -> list[LaneHealth]:
    """The lanes in the order of their models and names."""
    by_lane: dict[tuple[str, str], list[StageReport]] = {}
    for report in reports:
        if report.stage != MODEL_MANAGER:  # which is of no lane
            by_lane.setdefault((report.model, report.lane), []).append(report)
    return [_lane(*lane, by_lane[lane]) for lane in sorted(by_lane)]


def verdict(lanes: Sequence[LaneHealth]) -> str:
    """Why no request would be served, in one sentence; "" when some lane works."""
    if not lanes:
        return "no stage is running; start a pipeline with `nano-inference up`"
    if any(lane.ready for lane in lanes):
        return ""
    if len(lanes) == 1:
        return lanes[0].reason
    return "; ".join(f"lane {lane.lane}: {lane.reason}" for lane in lanes)


def weights_trouble(lanes: Sequence[LaneHealth]) -> str:
    """What weights or memory the ready lanes lack, in one sentence; "" if one lacks nothing.

    While all lack some, requests wait, or are answered under other weights than were sent.
    """
    reasons = [(lane.lane, _lacks(lane)) for lane in lanes if lane.ready]
    if not all(reason for _, reason in reasons):
        return ""
    return "; ".join(f"lane {name}: {why}" if len(reasons) > 1 else why for name, why in reasons)


def living_first(reports: Iterable[StageReport]) -> list[StageReport]:
    """By age, the youngest first; those of processes that have ended come last."""
    return sorted(reports, key=lambda report: (report.process_state == "gone", report.age_s))


def problem_of(report: StageReport, epoch: int) -> str:
    """Why a stage does not take part in the lane's current epoch; "" when it does."""
    if report.process_state == "gone":
        return f"{report.stage} has ended (process {report.pid})"
    if report.process_state == "stopped":
        return f"{report.stage} is stopped; continue it with `kill -CONT {report.pid}`"
    if report.age_s > LATE_S:
        return f"{report.stage} was last heard of {report.age_s:.0f} s ago"
    if report.state != "ready":
        return f"{report.stage} is {report.state}: {report.reason}"
    if report.epoch != epoch:
        return f"{report.stage} has not come into the current epoch"
    return ""


def _lane(model: str, lane: str, reports: Sequence[StageReport]) -> LaneHealth:
    stages: dict[str, StageReport] = {}
    rivals: set[str] = set()
    for report in living_first(reports):
        youngest = stages.setdefault(report.stage, report)
        ended = report.process_state == "gone"
        # What was told within the same moments can't be a process and its successor.
        if youngest is not report and not ended and report.age_s - youngest.age_s < 1.5:
            rivals.add(report.stage)
    epoch = max(report.epoch for report in reports)
    by_replica: dict[int, list[str]] = {}
    for replica in replicas_of(stages):
        by_replica[replica] = [role_of(stage, replica) for stage in REPLICATED]
    front = [stage for stage in STAGES if stage not in REPLICATED]
    reasons = [_reason([*front, *roles], stages, epoch) for roles in by_replica.values()]
    reason = "" if "" in reasons else reasons[0]
    order = all_roles(1 + max(by_replica))
    ordered: dict[str, StageReport] = {role: stages[role] for role in order if role in stages}
    return LaneHealth(lane, epoch, reason, ordered, tuple(sorted(rivals)), model)


def _lacks(lane: LaneHealth) -> str:
    """What one of its executors lacks; "" when none lacks anything."""
    for role, report in lane.stages.items():
        if lost := report.load.get("weights_lost"):
            return (
                f"{role} has no weights (weights_lost), since writing new ones failed midway "
                f"({lost}); send all of them in one update"
            )
        if lacks := report.load.get("lacks"):
            return (
                f"{role} can generate nothing: {lacks} released or not restored; resume the "
                "memory, and after the weights were released send all of them"
            )
        if behind := report.load.get("behind_version"):
            return (
                f"{role} was started anew and serves the weights of model_path, not version "
                f"{behind}; send all weights"
            )
    return ""


def replicas_of(roles: Iterable[str]) -> list[int]:
    """Which replicas these roles are of; 0 is always among them."""
    return sorted({0, *(split_role(role)[1] for role in roles)})


def _reason(roles: Sequence[str], stages: Mapping[str, StageReport], epoch: int) -> str:
    """Why these do not work together; "" when they do."""
    ordered = sorted(roles, key=lambda role: STAGES.index(split_role(role)[0]))
    missing = [role for role in ordered if role not in stages]
    if missing:
        return f"no process runs {', '.join(missing)}"
    return next(filter(None, (problem_of(stages[role], epoch) for role in ordered)), "")

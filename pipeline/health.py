"""The health of lanes, from the reports of their stages: which serve, and why others do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..bus.links import MODEL_MANAGER
from ..config import STAGES, all_roles, role_of, split_role
from ..store.board import StageReport

LATE_S = 5.0
"""Age from which a report counts as late: processes report every second. A late process is busy or
has been killed; it may report again."""


class LaneHealth(msgspec.Struct, frozen=True):
    """The health of one lane.

    Attributes:
        lane: Its name.
        epoch: The newest epoch that one of its stages reports.
        reason: Why it serves no requests; "" if it does. One working replica is enough.
        stages: For each role the report of the process that reported last.
        rivals: Stages that more than one process runs, where there must be one.
        model: Its model, in a deployment of several.
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
    """Return the lanes in the order of their models and names."""
    by_lane: dict[tuple[str, str], list[StageReport]] = {}
    for report in reports:
        if report.stage != MODEL_MANAGER:  # it belongs to no lane
            by_lane.setdefault((report.model, report.lane), []).append(report)
    return [_lane(*lane, by_lane[lane]) for lane in sorted(by_lane)]


def reason_of(
    states: Mapping[str, str], lanes: Sequence[LaneHealth], *, weights: bool = False
) -> str:
    """Return why no request would be served, in one sentence; "" if some lane works.

    Args:
        states: The states of several models; empty for a single model.
        lanes: The lanes of all models.
        weights: Whether missing weights or memory are a reason, too.
    """

    def reason(lanes: Sequence[LaneHealth]) -> str:
        return verdict(lanes) or (weights_trouble(lanes) if weights else "")

    if not states:
        return reason(lanes)
    reasons: list[str] = []
    for model, state in states.items():
        why = f"it is {state}"
        if state in ("ready", "draining"):
            why = reason([each for each in lanes if each.model == model])
        if not why:
            return ""
        reasons.append(f"model {model}: {why}")
    return "; ".join(reasons)


def held_of(lanes: Iterable[LaneHealth]) -> str:
    """Return why lanes compute no step although their stages work; "" if none is held.

    An idle lane is held too, so that its next request is no surprise.
    """
    held = {
        str(report.load["held"])
        for lane in lanes
        for role, report in lane.stages.items()
        if split_role(role)[0] == "batching" and report.load.get("held")
    }
    return "; ".join(sorted(held))


def verdict(lanes: Sequence[LaneHealth]) -> str:
    """Return why no lane of a model serves requests, in one sentence; "" if some lane works."""
    if not lanes:
        return "no stage is running; start a pipeline with `nano-inference up`"
    if any(lane.ready for lane in lanes):
        return ""
    if len(lanes) == 1:
        return lanes[0].reason
    return "; ".join(f"lane {lane.lane}: {lane.reason}" for lane in lanes)


def role_trouble(lanes: Sequence[LaneHealth], role: str) -> str:
    """Return why no replica with a role works; "" if one does.

    Args:
        lanes: The lanes of one model.
        role: "prefill" or "decode". A replica that does both has each of them.
    """
    reasons = [_role_trouble(lane, role) for lane in lanes]
    if "" in reasons:
        return ""
    return f"{role} pool not ready: " + ("; ".join(reasons) or verdict(lanes))


def roles_of(lane: LaneHealth) -> dict[int, str]:
    """Return the role of each replica that reports."""
    fairness = lane.stages.get("fairness")
    named = str(fairness.load.get("roles", "")).split(",") if fairness is not None else []
    roles = dict(enumerate(filter(None, named)))
    return {replica: roles.get(replica, "both") for replica in replicas_of(lane.stages)}


def _role_trouble(lane: LaneHealth, role: str) -> str:
    having = [replica for replica, its in roles_of(lane).items() if its in (role, "both")]
    reasons = [_reason(replica, lane.stages, lane.epoch) for replica in having]
    if "" in reasons:
        return ""
    why = reasons[0] if reasons else f"no replica has the role {role}"
    return f"lane {lane.lane}: {why}"


def weights_trouble(lanes: Sequence[LaneHealth]) -> str:
    """Return which weights or memory all ready lanes lack; "" if one lane lacks none.

    While all lack some, requests wait, or are answered with older weights.
    """
    reasons = [(lane.lane, _missing(lane)) for lane in lanes if lane.ready]
    if not all(reason for _, reason in reasons):
        return ""
    return "; ".join(f"lane {name}: {why}" if len(reasons) > 1 else why for name, why in reasons)


def living_first(reports: Iterable[StageReport]) -> list[StageReport]:
    """Sort reports by age, the youngest first; reports of ended processes come last."""
    return sorted(reports, key=lambda report: (report.process_state == "gone", report.age_s))


def problem_of(report: StageReport, epoch: int) -> str:
    """Return why a stage does not take part in the lane's current epoch; "" if it does."""
    if report.process_state == "gone":
        return f"{report.stage} has ended (process {report.pid})"
    if report.process_state == "stopped":
        return f"{report.stage} is stopped; continue it with `kill -CONT {report.pid}`"
    if report.age_s > LATE_S:
        return f"{report.stage} reported last {report.age_s:.0f} s ago"
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
        # Reports less than 1.5 s apart can't be of a process and its successor.
        if youngest is not report and not ended and report.age_s - youngest.age_s < 1.5:
            rivals.add(report.stage)
    epoch = max(report.epoch for report in reports)
    replicas = replicas_of(stages)
    reasons = [_reason(replica, stages, epoch) for replica in replicas]
    ordered = {role: stages[role] for role in all_roles(1 + max(replicas)) if role in stages}
    reason = "" if "" in reasons else reasons[0]
    return LaneHealth(lane, epoch, reason, ordered, tuple(sorted(rivals)), model)


def _reason(replica: int, stages: Mapping[str, StageReport], epoch: int) -> str:
    """Return why the stages and this replica do not work together; "" if they do."""
    roles = [role_of(stage, replica) for stage in STAGES]
    missing = [role for role in roles if role not in stages]
    if missing:
        return f"no process runs {', '.join(missing)}"
    return next(filter(None, (problem_of(stages[role], epoch) for role in roles)), "")


def _missing(lane: LaneHealth) -> str:
    """Return the weights or memory that one of the executors lacks; "" if none lacks any."""
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
                f"{role} has restarted and serves the weights of model_path, not version "
                f"{behind}; send all weights"
            )
    return ""


def replicas_of(roles: Iterable[str]) -> list[int]:
    """Return the replicas of these roles; 0 is always among them."""
    return sorted({0, *(split_role(role)[1] for role in roles)})

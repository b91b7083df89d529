"""The links between stages: senders, receiver, and bound of each.

    client ──requests──► admission ──admitted──► fairness ──dispatch──► batching ──plans──► executor
                          │     ▲                    ▲                  │    ▲                │
                          │     └─finished─┐         └─────credits──────┘    ├─────steps──────┤
                          │                │                                 │                │
                          ├───opened───► streaming ───────────halts──────────┘                │
                          └───refused──►   │  ▲                                               │
    client ◄──results──────────────────────┘  └────────────────────steps──────────────────────┘

    handovers: batching, executor ──► batching of another replica

    control: any sender ──► any stage. It also carries streaming's requests to the reference model
    (ScoreSample) and an executor's replies (SampleScored). Clients also send to the model manager
    of a deployment (LoadModel, UnloadModel), which is no stage.

With several replicas each batching and executor pair has its own copy of the links that begin or
end there, named `dispatch.1` and so on for replica 1; see `at`.

A link has one receiver. `steps` is two links: streaming gets a StepResult, batching a StepSummary.
Feedback links (finished, credits, handovers, halts, steps) carry at most a fixed number of messages
per request or sequence in flight, or per remaining step; their capacity is above that number, so
that no cycle of full links can deadlock.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ..config import STAGES, role_of
from .control import Cancel, LoadModel, StopSequences, UnloadModel
from .envelope import Message
from .messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    Credit,
    Handover,
    PauseSequences,
    ReleaseBlocks,
    RequestFinished,
    RequestOpened,
    ResumeSequences,
    WithdrawSequences,
)
from .recovery import Fenced, Recover, Recovered, Retracted
from .steps import StepPlan, StepResult, StepSummary

M = TypeVar("M", bound=Message)


class Link(NamedTuple, Generic[M]):
    """One direction of traffic with one receiver, for messages of the types `M`.

    Attributes:
        senders: Stages; clients may send on control links as well.
        closes_circle: The protocol bounds the waiting messages, so the link needs no bound.
        of_all_replicas: Whether senders of every replica send to the receiver of one.
    """

    name: str
    senders: tuple[str, ...]
    receiver: str
    closes_circle: bool = False
    of_all_replicas: bool = False

    def roles(self, replicas: int) -> tuple[str, ...]:
        """Return the roles that send, in a pipeline with this number of replicas."""
        if not self.of_all_replicas:
            return self.senders
        return tuple(role_of(stage, n) for stage in self.senders for n in range(replicas))


AnyLink = Link[Any]

HandoverMessage = AnnounceSequence | AnnounceBlocks | Handover | WithdrawSequences
DispatchMessage = AdmittedRequest | PauseSequences | ResumeSequences | ReleaseBlocks | Cancel

ADMITTED: Link[AdmittedRequest | Cancel] = Link("admitted", ("admission",), "fairness")
DISPATCH: Link[DispatchMessage] = Link("dispatch", ("fairness",), "batching")
CREDITS: Link[Credit] = Link("credits", ("batching",), "fairness", closes_circle=True)
HANDOVERS: Link[HandoverMessage] = Link(
    "handovers", ("batching", "executor"), "batching", closes_circle=True, of_all_replicas=True
)
PLANS: Link[StepPlan] = Link("plans", ("batching",), "executor")
STEPS_BATCHING: Link[StepSummary] = Link(
    "steps.batching", ("executor",), "batching", closes_circle=True
)
STEPS_STREAMING: Link[StepResult] = Link("steps.streaming", ("executor",), "streaming")
HALTS: Link[StopSequences] = Link("halts", ("streaming",), "batching", closes_circle=True)
REFUSED: Link[Cancel] = Link("refused", ("admission",), "streaming")
OPENED: Link[RequestOpened | Recover | Cancel] = Link("opened", ("admission",), "streaming")
"""Also carries Recover, and Cancel of requests taken over by another lane."""
FINISHED: Link[RequestFinished | Fenced | Recovered | Retracted] = Link(
    "finished", ("streaming",), "admission", closes_circle=True
)
CONTROL: dict[str, Link[Message]] = {
    stage: Link(f"control.{stage}", STAGES, stage, closes_circle=True) for stage in STAGES
}
LINKS: tuple[AnyLink, ...] = (
    ADMITTED,
    DISPATCH,
    CREDITS,
    HANDOVERS,
    PLANS,
    STEPS_BATCHING,
    STEPS_STREAMING,
    HALTS,
    REFUSED,
    OPENED,
    FINISHED,
    *CONTROL.values(),
)

MODEL_MANAGER = "models"
"""Role of the model manager, which loads and unloads a deployment's models."""
MODELS: Link[LoadModel | UnloadModel] = Link(
    "control.models", (), MODEL_MANAGER, closes_circle=True
)
"""The model manager's inbox; not part of a lane."""

PER_REPLICA = (
    DISPATCH,
    CREDITS,
    HANDOVERS,
    PLANS,
    STEPS_BATCHING,
    STEPS_STREAMING,
    HALTS,
    CONTROL["batching"],
    CONTROL["executor"],
)


def at(link: Link[M], replica: int) -> Link[M]:
    """Return the link of a replica, given that of replica 0, in `PER_REPLICA`."""
    return cast(Link[M], _at(link, replica)) if replica else link


@cache
def _at(link: AnyLink, replica: int) -> AnyLink:
    senders = link.senders
    if not link.of_all_replicas:
        senders = tuple(role_of(stage, replica) for stage in senders)
    receiver = role_of(link.receiver, replica)
    return link._replace(name=f"{link.name}.{replica}", senders=senders, receiver=receiver)


@cache
def all_links(replicas: int) -> tuple[AnyLink, ...]:
    """Return every link of a pipeline with this number of replicas."""
    further = (at(link, replica) for replica in range(1, replicas) for link in PER_REPLICA)
    return (*LINKS, *further)


def links_to(role: str, replicas: int = 1) -> tuple[AnyLink, ...]:
    """Return the links that end at a stage, or at the model manager."""
    if role == MODEL_MANAGER:
        return (MODELS,)
    return tuple(link for link in all_links(replicas) if link.receiver == role)

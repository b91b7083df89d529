"""What the fairness core gives to its shell: dispatches, and counts for telemetry."""

from __future__ import annotations

from collections import Counter

import msgspec

from ...bus.messages import AdmittedRequest, Dispatch, ResumeSequences
from .replicas import Running


class Dispatched(msgspec.Struct, frozen=True):
    """What `pop` gives: a message for a replica, and what telemetry and budget need.

    Attributes:
        resumed: The sequence that is resumed; None where sequences start.
        last: No sequence of the request waits any more for its first run.
        passed_by: Dispatches while it waited: of other priorities, of other tenants, of its own.
    """

    replica: str
    message: Dispatch | ResumeSequences
    request: AdmittedRequest
    arrived_ns: int
    deadline_ns: int | None
    resumed: Running | None
    last: bool
    passed_by: tuple[int, int, int]


class Counts(msgspec.Struct):
    """What has happened, for telemetry. Tokens are those generated, by priority."""

    preemptions: int = 0
    yields: int = 0
    resumes: int = 0
    recomputed_tokens: int = 0
    hopeless: int = 0
    tokens: Counter[int] = msgspec.field(default_factory=Counter)

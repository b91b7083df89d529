"""Causes of a request's time, and the parts of plans and results that they follow from.

Every nanosecond of a request's life has one cause (docs/time.md). The streaming stage adds them up
from the instants that messages carry.
"""

from __future__ import annotations

from typing import Literal

from .public_base import OutputPart
from .sections import Section

Cause = Literal[
    "http",
    "queue",
    "credits",
    "others_prefill",
    "others_decode",
    "preemption",
    "weights",
    "recovery",
    "unknown",
    "own_prefill",
    "own_decode",
    "kv",
    "overhead",
    "delivery",
    "slow_client",
]

CAUSES: dict[Cause, str] = {
    "http": "at the gateway, until the request is on the queue: reading, checks, limits",
    "queue": "on the requests queue, until admission takes the request",
    "credits": "in fairness, until a batch has a place",
    "others_prefill": "ready to run, while steps computed prompt tokens of others",
    "others_decode": "ready to run, while other steps of others ran",
    "preemption": "paused or preempted, until the next token",
    "weights": "no step may run: new weights, a pause, released memory",
    "recovery": "from a failure until the next token",
    "unknown": "before a failure that took the account with it",
    "own_prefill": "steps that compute the request's prompt",
    "own_decode": "steps that give its tokens",
    "kv": "waiting for KV blocks from a tier or another replica",
    "overhead": "the engine's own work and transport: checks, tokenising, planning, gaps",
    "delivery": "from the last token to the terminal message, and to the gateway's answer",
    "slow_client": "the client does not read its answer",
}
"""Causes with their meaning, in the order in which they are shown."""

Break = Literal["preemption", "weights", "recovery", "kv"]
"""Why a sequence that had begun does not run."""


class StepTimes(Section, frozen=True):
    """In StepPlan and StepResult: causes of the times of a step, besides its start and end.

    A plan has the rows that are planned, its result those that were computed. A plan without this
    section has decodes only.

    Attributes:
        num_decodes: In a plan: rows at its beginning that compute one generated token each.
        num_tokens: In a result: computed tokens, drafted ones included.
        prefills: In a result: (sequence, tokens) of the other rows, in order; 0 tokens for a shared
            prefill.
        held_ns: From when to when no step was allowed, before the plan: a pause, or memory that is
            lacking; None for no such time.
        changed_ns: In a result: the time when new weights were in place, and memory released,
            between the step's start and its rows; 0 without a change.
        left: (sequence, reason) of each sequence that runs no more since the plan before, and has
            not ended.
    """

    num_decodes: int = 0
    num_tokens: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    held_ns: tuple[int, int] | None = None
    changed_ns: int = 0
    left: tuple[tuple[int, Break], ...] = ()


NO_TIMES = StepTimes()


class StageTime(OutputPart, frozen=True, kw_only=True):
    """Arrival at a stage, and departure."""

    stage: str
    start_ns: int
    end_ns: int

"""Speculative decoding."""

from __future__ import annotations

from typing import ClassVar

from ..control import InternalPart
from ..sections import Section


class VerifiedDraft(InternalPart, frozen=True, array_like=True):
    """A row's drafted tokens, of which the first `num_accepted` were what was sampled.

    `source`: where they came from, as in `engine.draft_sources`, or "model".
    """

    seq_id: int
    source: str
    num_tokens: int
    num_accepted: int


class DraftCapacity(Section, frozen=True):
    """In ReplicaCapacity: steps can verify drafts."""


class Prediction(Section, frozen=True):
    """In AdmittedRequest: the output that the client expects, as tokens; a draft."""

    token_ids: tuple[int, ...]


class DraftsPlan(Section, frozen=True):
    """In StepPlan.

    Attributes:
        num_tokens: `[rows]`, drafted tokens that the executor may verify in a row besides, for
            which the row's blocks have room.
    """

    num_tokens: tuple[int, ...]


class DraftsResult(Section, frozen=True):
    """In StepResult and StepSummary.

    Attributes:
        verified: For each row in which drafted tokens were verified.
        rest: So many plans to come need allow no drafts, since they would not pay.
    """

    for_batching: ClassVar[bool] = True

    verified: tuple[VerifiedDraft, ...] = ()
    rest: int = 0

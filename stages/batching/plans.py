"""The plans that are under way, and what the next one has to carry."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec

from ...bus.control import Cancel
from ...bus.messages import StepSummary
from .sequence import Sequence


class PlannedRow(NamedTuple):
    """A row that is not in step: its tokens, whether it samples, and how many drafts it allows."""

    seq: Sequence
    num_tokens: int
    samples: bool
    num_drafts: int


class SentPlan(msgspec.Struct, frozen=True):
    """A plan whose result is not back.

    Attributes:
        step_id: As in the plan.
        in_step: Whether it is a step of the running batch.
        rows: Its other rows.
        ended: As in the plan.
    """

    step_id: int
    in_step: bool
    rows: tuple[PlannedRow, ...]
    ended: tuple[Cancel, ...]


def accepted_tokens(result: StepSummary) -> dict[int, list[int]]:
    """Of each sequence that got several tokens in a step, all of them but the last."""
    accepted: dict[int, list[int]] = {}
    if result.drafts:
        tokens = zip(result.seq_ids, result.token_ids, strict=True)
        for (seq_id, token_id), (next_id, _) in pairwise(tokens):
            if seq_id == next_id:
                accepted.setdefault(seq_id, []).append(token_id)
    return accepted


class NextPlan(msgspec.Struct):
    """What happened since the last plan and goes out with the next one.

    Attributes:
        ended: Requests that were cut short.
        forget: Sequences that run no more; the executor drops what it knows of them.
        weight_version: Of weights to be put in place before the step; 0 for none.
        release: Tags of memory to be released before the step.
        retract: Whether all that runs gives up its KV first.
        retract_adapters: Of which adapters all that runs does.
        retract_pooled_adapters: Of which adapters all of it does that ends with its prompt's
            vector.
        adapters: As in the plan, by id.
        retract_pooled: Whether all of it does that ends with its prompt's vector, which has to be
            of one version of the weights.
    """

    ended: list[Cancel] = []
    forget: list[int] = []
    weight_version: int = 0
    release: tuple[str, ...] = ()
    retract: bool = False
    retract_adapters: set[str] = set()
    retract_pooled_adapters: set[str] = set()
    adapters: dict[str, int] = {}
    retract_pooled: bool = False

    @property
    def cannot_wait(self) -> bool:
        """Whether the plan is to be made though no sequence has a row in it."""
        return bool(self.ended or self.weight_version or self.release or self.adapters)

    @property
    def retracts(self) -> bool:
        """Whether anything that runs gives up its KV first."""
        return (
            self.retract
            or self.retract_pooled
            or bool(self.retract_adapters or self.retract_pooled_adapters)
        )

    def retracts_it(self, seq: Sequence) -> bool:
        """Whether a running sequence does."""
        adapter = seq.info.adapter
        if self.retract or adapter in self.retract_adapters:
            return True
        return seq.pools and (self.retract_pooled or adapter in self.retract_pooled_adapters)

    def retracted(self) -> None:
        """They have done so."""
        self.retract = self.retract_pooled = False
        self.retract_adapters.clear()
        self.retract_pooled_adapters.clear()

    @property
    def waits_for_results(self) -> bool:
        """Whether all other plans must be back before it is made: it takes KV away."""
        return self.retracts or bool(self.release)

"""Drafted tokens, which the executor verifies beside those that it computes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from ....bus.control import ReplicaCapacity
from ....bus.messages import AdmittedRequest
from ....bus.parts.speculation import DraftsPlan, DraftsResult, Prediction
from ....bus.steps import StepSummary
from ....config import EngineConfig
from ..plans import PlanDraft, SentPlan
from ..schedule import SchedulerOutput
from ..sequence import Sequence, SequenceStatus
from . import Core, Part


class Speculation(Part):
    """Grants decoding sequences drafts, in blocks and tokens that are left over."""

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._max_drafts = config.max_draft_tokens
        self._rest = 0  # plans to come that allow no drafts

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        own = request.sampling.max_draft_tokens
        seq.max_drafts = self._max_drafts if own is None else min(own, self._max_drafts)
        if (prediction := Prediction.find(request.parts)) is not None:
            seq.extras["prediction"] = prediction

    def start(self, seq: Sequence, new: dict[str, Any]) -> None:
        if (prediction := seq.extras.get("prediction")) is not None:
            new["parts"] += (prediction,)

    def extend(self, decision: SchedulerOutput) -> SchedulerOutput:
        if self._rest or decision.preempted_seqs:
            return decision
        index, num_blocks = self.core.index, dict(decision.num_blocks)
        block_size = self.core.limits.block_size
        free = self.core.cache.num_free_blocks() - sum(num_blocks.values())
        prefills = [index[seq_id] for seq_id in decision.prefill_seqs]
        starts = [seq for seq in prefills if seq.status is SequenceStatus.WAITING]
        free -= sum(seq.blocks_to_start(block_size) for seq in starts)
        budget = self.core.limits.max_tokens_per_batch - sum(decision.num_tokens.values())
        decodes = [index[seq_id] for seq_id in decision.decode_seqs]
        num_drafts = grant_drafts(decodes, free, budget, block_size, num_blocks)
        return msgspec.structs.replace(decision, num_drafts=num_drafts, num_blocks=num_blocks)

    def planned(self, draft: PlanDraft) -> None:
        self._rest = max(self._rest - 1, 0)
        if num_drafts := draft.decision.num_drafts:
            for seq_id, number in num_drafts.items():
                self.core.index[seq_id].num_drafting += number
            numbers = tuple([num_drafts.get(seq_id, 0) for seq_id in draft.num_tokens])
            draft.parts.append(DraftsPlan(numbers))

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        planned, done = DraftsPlan.find(sent.plan.parts), DraftsResult.find(result.parts)
        self._rest = (done.rest if done is not None else 0) or self._rest
        if planned is not None:
            accepted = accepted_tokens(result) if done is not None and done.verified else {}
            for seq, number in zip(sent.seqs, planned.num_tokens, strict=True):
                if number and seq.status is not SequenceStatus.FINISHED:
                    seq.settle_drafts(number, accepted.get(seq.seq_id, ()))
        return ()

    def reset(self) -> None:
        self._rest = 0


def grant_drafts(
    decodes: Iterable[Sequence],
    num_free_blocks: int,
    num_tokens: int,
    block_size: int,
    num_blocks: dict[int, int],
) -> dict[int, int]:
    """Return the number of drafts to verify by sequence id; add their blocks to `num_blocks`."""
    granted: dict[int, int] = {}
    for seq in decodes:
        wanted = min(seq.num_draftable(), num_tokens)
        if wanted <= 0:
            continue
        lacking = seq.num_lacking(wanted, block_size) - seq.num_lacking(0, block_size)
        if lacking > num_free_blocks:
            wanted, lacking = min(wanted, seq.num_spare(block_size)), 0
        if wanted > 0:
            granted[seq.seq_id] = wanted
            num_free_blocks -= lacking
            num_tokens -= wanted
            if lacking:
                num_blocks[seq.seq_id] = num_blocks.get(seq.seq_id, 0) + lacking
    return granted


def accepted_tokens(result: StepSummary) -> dict[int, list[int]]:
    """Return all tokens but the last of each sequence that got several in a step."""
    accepted: dict[int, list[int]] = {}
    tokens = zip(result.seq_ids, result.token_ids, strict=True)
    for (seq_id, token_id), (next_id, _) in pairwise(tokens):
        if seq_id == next_id:
            accepted.setdefault(seq_id, []).append(token_id)
    return accepted

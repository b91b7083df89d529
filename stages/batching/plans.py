"""Plans in flight, and the contents of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import NamedTuple

from ...bus.control import Cancel
from ...bus.messages import RequestInfo
from ...bus.parts.speculation import DraftsPlan
from ...bus.steps import StepPlan, StepSummary
from ...bus.times import Break, StepTimes
from .cache import KVCacheManager
from .images import ImageCache
from .sequence import Sequence, SequenceStatus


class SentPlan(NamedTuple):
    """A plan whose result is not back, and the sequences of its rows."""

    plan: StepPlan
    seqs: list[Sequence]


@dataclass
class NextPlan:
    """Events since the last plan, which go out with the next one.

    Attributes:
        ended: Requests that were cut short.
        forget: Sequences that run no more; the executor drops its state of them.
        weight_version: Of weights to put in place before the step; 0 for none.
        release: Tags of memory to release before the step.
        adapters: As in StepPlan, by id.
        recompute: Running sequences that match one of these drop their KV first.
        left: As in StepTimes.
        held_since_ns: Since when no step is allowed; 0 if one is.
    """

    ended: list[Cancel] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    weight_version: int = 0
    release: tuple[str, ...] = ()
    adapters: dict[str, int] = field(default_factory=dict)
    recompute: list[Callable[[Sequence], bool]] = field(default_factory=list)
    left: list[tuple[int, Break]] = field(default_factory=list)
    held_since_ns: int = 0

    @property
    def cannot_wait(self) -> bool:
        """Whether the plan has to be made even without rows."""
        return bool(self.ended or self.weight_version or self.release or self.adapters)

    @property
    def waits_for_results(self) -> bool:
        """Whether all plans in flight must be back first, since the plan takes KV away."""
        return bool(self.recompute or self.release)

    def begin(self, cache: KVCacheManager, images: ImageCache | None) -> None:
        """Forget the KV and the embeddings that the plan makes useless."""
        if "kv_cache" in self.release:
            cache.forget_device()
        if images is not None and (self.weight_version or self.release):
            images.clear()
        if self.weight_version:
            cache.begin_weight_version(self.weight_version)

    def times(self, num_decodes: int, now_ns: int) -> StepTimes:
        """Return the plan's times; `num_decodes`: as there."""
        since_ns = self.held_since_ns
        if not (since_ns or self.left):
            return StepTimes(num_decodes)
        held = (since_ns, now_ns) if since_ns else None
        return StepTimes(num_decodes, held_ns=held, left=tuple(self.left))


def settle(sent: SentPlan, result: StepSummary) -> tuple[list[Sequence], int]:
    """Apply a result to the sequences of its plan.

    Returns:
        Sequences to commit, and the number of tokens computed for sequences that had ended.
    """
    due: list[Sequence] = []
    num_wasted = 0
    plan, tokens = sent.plan, dict(zip(result.seq_ids, result.token_ids, strict=True))
    accepted, drafts = accepted_tokens(result), DraftsPlan.find(plan.parts)
    all_drafts = repeat(0) if drafts is None else drafts.num_tokens
    for seq, num_tokens, num_drafts in zip(sent.seqs, plan.num_tokens, all_drafts, strict=False):
        if seq.status is SequenceStatus.FINISHED:
            num_wasted += num_tokens
            continue
        seq.num_computed += num_tokens
        if num_drafts:
            seq.settle_drafts(num_drafts, accepted.get(seq.seq_id, ()))
        if seq.seq_id in tokens:
            seq.token_ids.append(tokens[seq.seq_id])
        if seq.num_computed >= seq.next_commit:
            due.append(seq)
    return due, num_wasted


def accepted_tokens(result: StepSummary) -> dict[int, list[int]]:
    """Return all tokens but the last of each sequence that got several in a step."""
    accepted: dict[int, list[int]] = {}
    if result.drafts:
        tokens = zip(result.seq_ids, result.token_ids, strict=True)
        for (seq_id, token_id), (next_id, _) in pairwise(tokens):
            if seq_id == next_id:
                accepted.setdefault(seq_id, []).append(token_id)
    return accepted


def aborted(info: RequestInfo, why: str) -> Cancel:
    """Return the cancellation of a request that keeps its tokens."""
    return Cancel(info.request_id, info.entry_id, "cancelled", "aborted", why)


def expired(info: RequestInfo) -> Cancel:
    """Return the cancellation of a request whose time is over."""
    message = "the request's time budget ran out before it was done"
    return Cancel(info.request_id, info.entry_id, "expired", "expired", message)


def unloaded(info: RequestInfo) -> Cancel:
    """Return the cancellation of a request whose adapter is not loaded."""
    message = (
        f"the adapter {info.adapter!r} is not loaded any more, or could not be had again after a "
        "failure; load it, and ask again"
    )
    return Cancel(info.request_id, info.entry_id, "error", "adapter_unloaded", message)

"""The self-audit of KV tiers: loaded blocks are computed again while nothing else runs.

In deterministic mode a loaded block and a computed one are equal bit for bit, so any difference is
a defect of a tier: of its memory, its disk, or this program. With recurrent state a block is
computed from the snapshot before it, and a loaded snapshot at its end is compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .....bus.messages import RequestInfo, SequenceSpec
from .....bus.steps import AUDIT_SEQ_ID, KVMove, NewSequence
from .....config import SamplingParams, SchedulerConfig
from ...allocation import Allocation
from ...cache import KVCacheManager
from .tiers import KVTiers, LoadedBlock

BLOCKS_SAVED_AT_ONCE = 16
"""Blocks that one plan saves to disk while nothing else runs; a new request waits that long."""

MAX_TOKEN_ID = (1 << 32) - 1
"""Larger ids stand for parts of images."""


class _Running(NamedTuple):
    """The block that is being computed; `snapshot`: of the state at its end, -1 for none."""

    block: LoadedBlock
    allocation: Allocation
    step_id: int
    snapshot: int


class TierAudit:
    """Computes chosen blocks, one at a time, in steps of their own, and has them compared."""

    def __init__(
        self, tiers: Sequence[KVTiers], cache: KVCacheManager, limits: SchedulerConfig
    ) -> None:
        """Set up an audit.

        Args:
            tiers: The tiers of blocks, whose `chosen` are computed, and of snapshots, if any.
            cache: The cache.
            limits: The scheduler's.
        """
        self._tiers = tiers[0]
        self._all = tiers
        self._cache = cache
        self._limits = limits
        self._running: _Running | None = None
        self._moves: tuple[KVMove, ...] = ()

    @property
    def has_moves(self) -> bool:
        """Whether the executor has something to do, with or without a step."""
        return bool(self._moves) or any(each.has_moves for each in self._all)

    @property
    def allocations(self) -> list[Allocation]:
        """The allocation of the block that is being computed."""
        return [self._running.allocation] if self._running is not None else []

    @property
    def is_due(self) -> bool:
        """Whether a block waits to be computed."""
        return bool(self._tiers.chosen) and self._running is None

    def begin(self, step_id: int) -> NewSequence | None:
        """Start the sequence that computes the next block; None if there is none."""
        while self.is_due:
            if (new := self._start(self._tiers.chosen.popleft(), step_id)) is not None:
                return new
        return None

    def absorb(self, step_id: int) -> bool:
        """Take the result of a step. Returns whether it was the audit's."""
        if self._running is None or self._running.step_id != step_id:
            return False
        block, computing, _, snapshot = self._running
        # Its place may have been given away meanwhile. The computed block, free from here on, is
        # compared before another one is written to it.
        if self._cache.name_of(block.block_id) == block.name:
            computed = computing.block_ids[-1]
            self._moves = (KVMove("compare", block.name, block_id=computed, other=block.block_id),)
            if snapshot < 0:
                self._tiers.end_audit()
            elif self._cache.states.number_of(block.name) == block.snapshot:
                compare = KVMove(
                    "compare", block.name, block_id=snapshot, other=block.snapshot, state=True
                )
                self._moves += (compare,)
                self._all[1].end_audit()
        self._end()
        return True

    def take_moves(self) -> tuple[KVMove, ...]:
        """Return the tiers' moves for the next plan, after the comparison to make."""
        moves, self._moves = self._moves, ()
        return (*moves, *(move for each in self._all for move in each.take_moves()))

    def clear(self) -> None:
        """Drop the audit in flight: the executor has forgotten its sequences."""
        self._moves = ()
        if self._running is not None:
            self._end()

    def _end(self) -> None:
        assert self._running is not None
        self._cache.release(self._running.allocation)
        if self._running.snapshot >= 0:
            self._cache.states.end_audit()
        self._running = None

    def _start(self, block: LoadedBlock, step_id: int) -> NewSequence | None:
        cache = self._cache
        # With an adapter, KV computed again may have other bits, and images are not kept here.
        if block.scope.adapter or max(block.token_ids) > MAX_TOKEN_ID:
            return None
        computing = Allocation(list(block.token_ids), block.scope, whole_blocks=True)
        match = cache.match(computing)
        count = len(block.token_ids) - match.num_cached
        fits = match.num_needed <= cache.num_free_blocks()
        if not fits or count > self._limits.max_tokens_per_batch:
            return None
        start = cache.start(computing, match.num_needed)
        # It may have been evicted before, or just now.
        if cache.name_of(block.block_id) != block.name:
            cache.release(computing)
            return None
        # Before the number is taken for the state at the end: it may load a snapshot.
        parts, snapshot = cache.states.sections(computing, start.cached_length), -1
        if block.snapshot >= 0:
            snapshot = cache.states.audit(AUDIT_SEQ_ID, len(block.token_ids))
            if snapshot < 0:
                cache.release(computing)
                return None
        self._running = _Running(block, computing, step_id, snapshot)
        return NewSequence(
            seq_id=AUDIT_SEQ_ID,
            # One more token, so that the step doesn't reach the end, and samples nothing.
            token_ids=(*block.token_ids, 0),
            num_generated=0,
            num_cached=start.cached_length,
            block_ids=start.block_ids,
            sampling=SamplingParams(max_tokens=1),
            sample=SequenceSpec(AUDIT_SEQ_ID, sample_index=0, seed=0),
            info=RequestInfo("", ""),
            cache_scope=block.scope,
            parts=parts,
        )

"""Sequences that another replica continues once they have their first token here."""

from __future__ import annotations

from collections.abc import Iterable

from ...bus.messages import Handover, KVMove, RemoteBlocks, StepSummary
from .cache import KVCacheManager
from .index import SequenceIndex
from .sequence import Sequence


class Handovers:
    """Offers the blocks of sequences that sample their first token, and hands them over.

    The blocks are offered by the step that computes the last of them, so that another executor can
    read them when the first token is known.
    """

    def __init__(self, cache: KVCacheManager, index: SequenceIndex) -> None:
        """Args: the cache, and the sequences that have not ended."""
        self._cache = cache
        self._index = index
        # Sequences whose first token is in flight, and the step that samples it.
        self._offered: dict[int, tuple[int, RemoteBlocks]] = {}
        self._messages: list[Handover] = []

    def offer(self, seqs: Iterable[Sequence], step_id: int, now_ns: int) -> list[KVMove]:
        """Offer the blocks of those sequences that sample in the plan being made."""
        moves: list[KVMove] = []
        for seq in seqs:
            if seq.hands_over and seq.num_planned > len(seq.token_ids):
                moves += (offered := self._cache.offer(seq.seq_id, seq.lease, now_ns))
                self._offered[seq.seq_id] = (step_id, self._describe(seq, offered))
        return moves

    def absorb(self, result: StepSummary) -> list[Sequence]:
        """Hand over the sequences that have their first token; return them.

        Call it when those that ended with the token are no longer in the index.
        """
        leaving: list[Sequence] = []
        for seq_id, (step_id, blocks) in [*self._offered.items()] if self._offered else ():
            if step_id != result.step_id:
                continue
            del self._offered[seq_id]
            seq = self._index.get(seq_id)
            if seq is None or seq_id not in result.seq_ids:  # it has ended, or is about to
                self.release(seq_id)
            else:
                generated = tuple(seq.token_ids[seq.num_prompt_tokens :])
                self._messages.append(Handover(seq_id, generated, blocks))
                seq.left = True
                leaving.append(seq)
        return leaving

    def take_messages(self) -> list[Handover]:
        """Return the messages to fairness since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def release(self, seq_id: int) -> None:
        """Give back the slots of blocks that were offered for a sequence."""
        if self._cache.tiers is not None:
            self._cache.tiers.release_offer(seq_id)

    def clear(self) -> None:
        """Drop all: the plans in flight never come back."""
        self._offered.clear()
        self._messages.clear()

    def _describe(self, seq: Sequence, offered: list[KVMove]) -> RemoteBlocks:
        tiers = self._cache.tiers
        return RemoteBlocks(
            address=tiers.capacity.address if tiers is not None else "",
            layout=tiers.capacity.layout if tiers is not None else "",
            weights=tiers.capacity.weights if tiers is not None else "",
            weight_version=self._cache.weight_version,
            adapter_version=seq.lease.scope.adapter_version,
            blocks=tuple((move.name, move.slot) for move in offered),
        )

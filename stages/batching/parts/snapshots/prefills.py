"""Prompts that are being computed, and the places in them where snapshots are made."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ...allocation import Allocation
from ...cache import KVCacheManager


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is being computed, with the tokens that a preemption has lost.

    Attributes:
        allocation: The sequence's.
        names: Names of its full blocks.
        whole: A name of all its tokens.
        num_tokens: Their number.
        first: Index of the first block that it computes.
        is_expected: Whether its sequence has not started yet.
        num_planned: Leading tokens that are computed once all plans so far are done.
        points: Numbers of leading tokens, whose state is to be saved by plans to come.
        num_in_flight: Number of its snapshots in plans in flight.
    """

    allocation: Allocation
    names: list[bytes]
    whole: Hashable
    num_tokens: int
    first: int
    is_expected: bool = True
    num_planned: int = 0
    points: set[int] = field(default_factory=set)
    num_in_flight: int = 0


class Prefills:
    """Prompts that are being computed, found by their blocks.

    A sequence that shares blocks with one of them waits for a snapshot at the end of the blocks
    that they share, if that end is still to be computed. So one of several siblings that come
    together computes what all of them need.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._expected: dict[Allocation, Prefill] = {}
        self._by_name: dict[Hashable, Prefill] = {}
        # Those that make a snapshot at the end of a block, by its name.
        self._promised: dict[Hashable, Prefill] = {}

    def follows(self, allocation: Allocation, num_blocks: int, *, saves: bool) -> bool:
        """Return whether a sequence waits for what another one computes, after so many blocks.

        Otherwise it is expected to start with the next plan. `saves`: whether there are snapshots.
        """
        if allocation in self._expected:
            return False
        prefill = self._describe(allocation, num_blocks)
        if allocation.reuses_all and self._waits(prefill, saves=saves):
            return True
        self._expect(prefill)
        return False

    def begin(self, allocation: Allocation, num_blocks: int) -> Prefill:
        """Begin a prefill after so many blocks."""
        if (prefill := self._expected.pop(allocation, None)) is None:
            prefill = self._describe(allocation, num_blocks)
            self._expect(prefill)
            del self._expected[allocation]
        prefill.is_expected = False
        self.advance(prefill, num_blocks * self._cache.block_size)
        return prefill

    def promise(self, prefill: Prefill, num_blocks: int) -> None:
        """Have a snapshot made after so many blocks, which are still to be computed."""
        prefill.points.add(num_blocks * self._cache.block_size)
        self._promised[prefill.names[num_blocks - 1]] = prefill

    def advance(self, prefill: Prefill, num_planned: int) -> list[int]:
        """Set `num_planned`; return the points that were passed, in order."""
        prefill.num_planned = num_planned
        passed = sorted(point for point in prefill.points if point <= num_planned)
        prefill.points.difference_update(passed)
        return passed

    def withdraw(self, prefill: Prefill, num_tokens: int) -> None:
        """Take note that the snapshot after so many tokens is made, or never will be."""
        name = prefill.names[num_tokens // self._cache.block_size - 1]
        if self._promised.get(name) is prefill:
            del self._promised[name]

    def end(self, prefill: Prefill) -> None:
        """Forget a prefill: its snapshots are made, or its sequence runs no more."""
        for name in (*prefill.names[prefill.first :], prefill.whole):
            if self._by_name.get(name) is prefill:
                del self._by_name[name]
            if self._promised.get(name) is prefill:
                del self._promised[name]
        prefill.points.clear()

    def end_expected(self) -> None:
        """Forget prefills that have not begun."""
        for prefill in self._expected.values():
            self.end(prefill)
        self._expected.clear()

    def clear(self) -> None:
        """Forget all."""
        self._expected.clear()
        self._by_name.clear()
        self._promised.clear()

    def _describe(self, allocation: Allocation, num_blocks: int) -> Prefill:
        size, token_ids = self._cache.block_size, allocation.token_ids
        names = self._cache.names_of(allocation, len(token_ids) // size)
        tail = tuple(token_ids[len(names) * size :])
        whole = (names[-1] if names else allocation.scope, tail)
        planned = num_blocks * size
        return Prefill(allocation, names, whole, len(token_ids), num_blocks, num_planned=planned)

    def _expect(self, prefill: Prefill) -> None:
        self._expected[prefill.allocation] = prefill
        for name in (*prefill.names[prefill.first :], prefill.whole):
            self._by_name[name] = prefill

    def _waits(self, prefill: Prefill, *, saves: bool) -> bool:
        size, num_tokens = self._cache.block_size, prefill.num_tokens
        same = self._find(prefill.whole)
        if same is not None and same.num_planned < num_tokens:
            return True  # it shares the step that computes the last token
        index, last, is_promised = prefill.first, None, False
        while saves and index < (num_tokens - 1) // size:
            name = prefill.names[index]
            if (other := self._find(name)) is None:
                break
            last, index = other, index + 1
            is_promised = is_promised or name in self._promised
        if last is not None and index * size > last.num_planned:
            self.promise(last, index)
            return True
        return is_promised

    def _find(self, name: Hashable) -> Prefill | None:
        """Return the prefill that computes a block, or all tokens, for others to find."""
        if (prefill := self._by_name.get(name)) is None:
            return None
        allocation = prefill.allocation
        has_blocks = bool(allocation.block_ids) and self._cache.is_current(allocation)
        return prefill if prefill.is_expected or has_blocks else None

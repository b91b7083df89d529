"""A prefix cache indexed by block-hash chains."""

from __future__ import annotations

from collections.abc import Hashable

from .allocation import Allocation
from .block_hash import common_length
from .cache import KVCacheManager, Prefix


class PagedKVCache(KVCacheManager):
    """Full blocks are found by the hash of their tokens and of all blocks before.

    For copies, the block computed last after each prefix is remembered too. That finds the
    partial block of siblings, but not the best of many continuations.
    """

    def num_cached_blocks(self) -> int:
        # Built-in counting is fast enough to be called between steps.
        entries = list(zip(self._indexed, self._runs, strict=True))
        return len(entries) - entries.count((None, None))

    def _find(self, allocation: Allocation) -> Prefix:
        size, token_ids, names = self.block_size, allocation.token_ids, allocation.names
        most = allocation.most_cached()
        root = self._extend_names(allocation, most // size)
        block_ids: list[int] = []
        for name in names[: most // size]:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        known = allocation.num_known = len(block_ids)
        source = self._latest.get(names[known - 1] if known else root, -1)
        run = self._runs[source] if source >= 0 else None
        if run is None:
            return Prefix(block_ids)
        start = known * size
        num_partial = common_length(run[1], token_ids[start : min(start + size, most)])
        return Prefix(block_ids, source, num_partial)

    def _index(self, allocation: Allocation, num_tokens: int) -> int:
        size, names = self.block_size, allocation.names
        full = num_tokens // size
        root = self._extend_names(allocation, full)
        first = allocation.num_known
        for index in range(first, -(-num_tokens // size)):
            block_id = allocation.block_ids[index]
            if index < full:
                # A block with this name that is indexed already stays the one to be found.
                if names[index] in self._block_of:
                    continue
                self._block_of[names[index]] = block_id
                self._indexed[block_id] = names[index]
            run = allocation.token_ids[index * size : min((index + 1) * size, num_tokens)]
            self._set_latest(names[index - 1] if index else root, list(run), block_id)
        allocation.num_known = max(first, full)
        return first

    def _end_of(self, allocation: Allocation, num_known: int) -> Hashable:
        return allocation.names[num_known - 1]

    def _set_latest(self, prefix: Hashable, run: list[int], block_id: int) -> None:
        before = self._latest.get(prefix)
        if before is not None and before != block_id:
            self._runs[before] = None
            if self._indexed[before] is None:
                self._demote(before)
        self._latest[prefix] = block_id
        self._runs[block_id] = (prefix, run)

    def _is_indexed(self, block_id: int) -> bool:
        return self._indexed[block_id] is not None or self._runs[block_id] is not None

    def is_indexed_whole(self, block_id: int) -> bool:
        return self._indexed[block_id] is not None

    def _forget(self, block_id: int) -> None:
        name = self._indexed[block_id]
        if name is not None:
            del self._block_of[name]
            self._indexed[block_id] = None
        run = self._runs[block_id]
        if run is not None:
            del self._latest[run[0]]
            self._runs[block_id] = None

    def _forget_all(self) -> None:
        self._indexed: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._latest: dict[Hashable, int] = {}
        # For the blocks in `_latest`: the prefix, and the tokens after it.
        self._runs: list[tuple[Hashable, list[int]] | None] = [None] * self.num_blocks

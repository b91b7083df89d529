"""A prefix cache indexed by block-hash chains."""

from __future__ import annotations

from .block_hash import chain_root, common_length, compute_block_hash
from .cache import KVCacheManager, Lease, Prefix


class PagedKVCache(KVCacheManager):
    """Full blocks are found by the hash of their tokens and of all blocks before.

    For copies, the block computed last behind each prefix is remembered too. That finds the
    partial block of siblings, but not the best of many continuations.

    A lease's chain holds the hashes of its full blocks.
    """

    def num_cached_blocks(self) -> int:
        # Built-in counting is fast enough to be called between steps.
        names = list(zip(self._hashes, self._runs, strict=True))
        return len(names) - names.count((None, None))

    def _find(self, lease: Lease) -> Prefix:
        size, token_ids, hashes = self.block_size, lease.token_ids, lease.chain
        most = len(token_ids) - 1
        root = self._extend_hashes(lease, most // size)
        block_ids: list[int] = []
        for block_hash in hashes[: most // size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        known = lease.num_known = len(block_ids)
        source = self._latest.get(hashes[known - 1] if known else root, -1)
        run = self._runs[source] if source >= 0 else None
        if run is None:
            return Prefix(block_ids)
        start = known * size
        num_partial = common_length(run[1], token_ids[start : min(start + size, most)])
        return Prefix(block_ids, source, num_partial)

    def _index(self, lease: Lease, num_tokens: int) -> int:
        size, hashes = self.block_size, lease.chain
        full = num_tokens // size
        root = self._extend_hashes(lease, full)
        first = lease.num_known
        for index in range(first, -(-num_tokens // size)):
            block_id = lease.block_ids[index]
            if index < full:
                # A block with this hash that is indexed already stays the one to be found.
                if hashes[index] in self._block_of:
                    continue
                self._block_of[hashes[index]] = block_id
                self._hashes[block_id] = hashes[index]
            run = lease.token_ids[index * size : min((index + 1) * size, num_tokens)]
            self._set_latest(hashes[index - 1] if index else root, list(run), block_id)
        lease.num_known = max(first, full)
        return first

    def _extend_hashes(self, lease: Lease, num_blocks: int) -> int:
        """Hash so many leading blocks; return the root of the chain."""
        size, hashes = self.block_size, lease.chain
        root = chain_root(self.weight_version, lease.scope)
        if lease.root != root:
            # A new lease, or another version of the weights.
            hashes.clear()
            lease.root = root
        for index in range(len(hashes), num_blocks):
            run = lease.token_ids[index * size : (index + 1) * size]
            hashes.append(compute_block_hash(run, hashes[-1] if hashes else root))
        return root

    def _set_latest(self, prefix_hash: int, run: list[int], block_id: int) -> None:
        before = self._latest.get(prefix_hash)
        if before is not None and before != block_id:
            self._runs[before] = None
            if self._hashes[before] is None:
                self._demote(before)
        self._latest[prefix_hash] = block_id
        self._runs[block_id] = (prefix_hash, run)

    def _is_indexed(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None or self._runs[block_id] is not None

    def _is_indexed_whole(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block_id] = None
        run = self._runs[block_id]
        if run is not None:
            del self._latest[run[0]]
            self._runs[block_id] = None

    def _forget_all(self) -> None:
        self._hashes: list[int | None] = [None] * self.num_blocks
        self._block_of: dict[int, int] = {}
        self._latest: dict[int, int] = {}
        # For the blocks in `_latest`: the prefix hash, and the tokens behind it.
        self._runs: list[tuple[int, list[int]] | None] = [None] * self.num_blocks

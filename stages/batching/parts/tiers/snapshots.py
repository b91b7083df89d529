"""Snapshots of a recurrent state below the device, beside the blocks at whose ends they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from .....bus.control import TierCapacity
from .....bus.messages import RemoteBlocks
from .....bus.steps import KVMove
from ...allocation import Allocation
from ...cache import KVCacheManager
from .tiers import MOST_CHOSEN, KVTiers, LoadedBlock, RemoteBlock


class SnapshotTiers:
    """Decides which snapshots are loaded and fetched: the last one of a sequence's blocks that
    saves more computing than it takes to load.

    Attributes:
        units: The snapshots of each tier.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        blocks: KVTiers,
        capacity: TierCapacity,
        policy: str,
        audit_every: int,
    ) -> None:
        """Args: the cache; the tiers of its blocks; those of snapshots; the rest as of KVTiers."""
        self.units = KVTiers(
            capacity, cache.block_size, policy, audit_every, cache.states.log, state=True
        )
        self.units.chosen = blocks.chosen
        self._cache = cache
        self._computing_ns = capacity.token_ns * cache.block_size
        # Numbers of snapshots that a later start could find on disk, and that may not be there.
        self._unsaved: dict[int, None] = {}
        # Names of loaded snapshots that are to be audited with the next start from them.
        self._chosen: deque[bytes] = deque(maxlen=MOST_CHOSEN)

    @property
    def has_unsaved(self) -> bool:
        """Whether snapshots are to be saved while nothing else runs."""
        return bool(self._unsaved)

    def reach(self, names: Sequence[bytes], num_blocks: int) -> int:
        """Return the number of leading names at whose end there is a snapshot in a host slot that
        pays, against computing the blocks after the first `num_blocks`; else that number."""
        for end in range(len(names), num_blocks, -1):
            if self.units.num_ready(names[end - 1 : end]) and self._pays(end - num_blocks):
                return end
        return num_blocks

    def fetch(self, allocation: Allocation, names: Sequence[bytes]) -> tuple[int, bool]:
        """Fetch the last snapshot of an allocation's blocks, if that pays.

        Each snapshot is fetched once for an allocation: if it does not come, an earlier one is.

        Args:
            allocation: Without blocks, or with leading ones.
            names: Names of leading blocks that are on the device, in host slots, or can be fetched.

        Returns:
            How many of the blocks are of use, and whether the sequence has to wait.
        """
        known = self._cache.states.usable(allocation, len(names))
        for end in range(len(names), known, -1):
            name = names[end - 1]
            remote = allocation.remote_states.get(name)
            fetch_ns = self.units.capacity.fetch_ns if remote is None else 0
            if name in allocation.fetched_states:
                if self.units.is_fetching(name):
                    return end, True
            elif (remote or self.units.num_stored([name])) and self._pays(end - known, fetch_ns):
                where: Mapping[bytes, RemoteBlock] = {} if remote is None else {name: remote}
                waits, _ = self.units.fetch([name], 0, where)
                if waits:
                    if self.units.is_fetching(name):
                        allocation.fetched_states |= {name}
                    return end, True
        return known, False

    def load(self, name: bytes, take: Callable[[], int]) -> None:
        """Load a snapshot; see `Below.load_state`."""
        with self.units.pinned([name]):
            number = take()
        if self.units.load(name, number):
            self._chosen.append(name)

    def started(self, allocation: Allocation, num_blocks: int) -> None:
        """Have the snapshot audited with which an allocation starts, if it is chosen."""
        name = allocation.names[num_blocks - 1]
        number = self._cache.states.number_of(name)
        if name in self._chosen and number >= 0:
            self._chosen.remove(name)
            before = allocation.token_ids[: num_blocks * self._cache.block_size]
            block_id = allocation.block_ids[num_blocks - 1]
            block = LoadedBlock(name, block_id, before, allocation.scope, number)
            self.units.chosen.append(block)

    def made(self, number: int, allocation: Allocation) -> None:
        """Take note of a new snapshot on the device."""
        if self.units.survives(self._cache.weight_version, allocation.scope):
            self._unsaved[number] = None

    def forgotten(self) -> None:
        """Take note that the device has no snapshot any more."""
        self._unsaved.clear()
        self._chosen.clear()

    def save_next(self) -> None:
        """Save one snapshot of the device to disk."""
        number, _ = self._unsaved.popitem()
        if (name := self._cache.states.name_of(number)) is not None:
            self.units.save(name, number)

    def offer(
        self, seq_id: int, allocation: Allocation, num_blocks: int, now_ns: int
    ) -> list[KVMove]:
        """Offer the last snapshot of so many leading blocks of a started sequence."""
        end, number = self._cache.states.last(seq_id, allocation, num_blocks)
        names = allocation.names[:num_blocks]
        ready = max(self.reach(names, 0), end)
        if not ready:
            return []
        number = number if ready == end else -1
        _, moves = self.units.offer(seq_id, names[ready - 1 : ready], [number], now_ns)
        return moves

    def remote_of(
        self, blocks: Mapping[bytes, RemoteBlock], remote: RemoteBlocks
    ) -> dict[bytes, RemoteBlock]:
        """Return snapshots that another executor offers by their names here.

        Args:
            blocks: The blocks that it offers, likewise.
            remote: What it offers.
        """
        ours = {block.name: name for name, block in blocks.items()}
        return {
            ours[name]: RemoteBlock(remote.states_address, name, slot, step)
            for name, slot, step in remote.states
            if name in ours
        }

    def _pays(self, num_blocks: int, fetch_ns: int = 0) -> bool:
        """Whether a snapshot is loaded faster than so many blocks are computed."""
        return self.units.capacity.load_ns + fetch_ns < num_blocks * self._computing_ns

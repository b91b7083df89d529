"""The log of KV events: which blocks of a replica can be found, for routers outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ....bus.control import ReplicaCapacity
from ....bus.kv_events import (
    DEVICE,
    DISK,
    HOST,
    STATE_GROUP,
    STATE_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    KVEvent,
    Medium,
)
from ....bus.messages import CacheScope
from ....bus.public import DEFAULT_TENANT
from ....config import EngineConfig
from ..allocation import Allocation, Follower
from ..cache import KVCacheManager
from . import Core, Part


class KVEvents(Part, Follower):
    """Logs each full block of the cache that can be found, and its end.

    Attributes:
        log: The log, which the shell publishes.
    """

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self.log = KVEventLog(core.cache.block_size)
        self._cache: KVCacheManager = core.cache
        core.cache.followers += (self,)
        core.cache.states.log = StateLog(self.log)

    def named(self, allocation: Allocation, first: int, end: int, named: Sequence[int]) -> None:
        index, size, names = first, self._cache.block_size, allocation.names
        while index < end:
            start = index
            while index < end and self._is_new(allocation.block_ids[index]):
                index += 1
            if start < index:
                self.log.store(
                    allocation.block_ids[start:index],
                    names[start:index],
                    names[start - 1] if start else None,
                    allocation.token_ids[start * size : index * size],
                    allocation.scope,
                )
            index += 1

    def evicted(self, block_id: int, name: bytes) -> None:
        self.log.remove(block_id)

    def hidden(self, block_id: int) -> None:
        self.log.remove(block_id)

    def forgotten(self) -> None:
        self.log.lose(DEVICE)

    def flushed(self, *, new_weights: bool) -> None:
        self.log.clear()

    def retire(self, adapter: str) -> Set[bytes]:
        return self.log.retire(adapter)

    def _is_new(self, block_id: int) -> bool:
        return self._cache.is_indexed_whole(block_id) and not self.log.is_announced(block_id)


def wire_hash(name: bytes) -> int:
    """Return a block's hash in events: 64 bits of its name, which every router can read."""
    return int.from_bytes(name[:8], "little")


class KVEventLog:
    """Events since the last `take`, and the blocks that the events so far have announced.

    A block is announced once in each medium, and removed once: a router that applies all events
    has exactly the announced blocks. The first event is AllBlocksCleared. Snapshots of a recurrent
    state are announced likewise, in the group of their own.
    """

    def __init__(self, block_size: int) -> None:
        """Args: `block_size` in tokens."""
        self._block_size = block_size
        self._events: list[KVEvent] = [AllBlocksCleared()]
        # The event that is still extended: removed, or stored below the device.
        self._run: tuple[type[BlockRemoved | BlockStored], Medium, bool, list[int]] | None = None
        # By medium, the announced blocks and their adapters ("" for none); and the snapshots.
        self._announced: dict[tuple[Medium, bool], dict[bytes, str]] = {
            (medium, state): {} for medium in (DEVICE, HOST, DISK) for state in (False, True)
        }
        self._name_of: dict[int, bytes] = {}

    def take(self) -> tuple[KVEvent, ...]:
        """Return the events since the last call."""
        self._end_run()
        events, self._events = tuple(self._events), []
        return events

    def clear(self) -> None:
        """Announce that nothing can be found any more."""
        self._events, self._run = [AllBlocksCleared()], None
        self._name_of.clear()
        for announced in self._announced.values():
            announced.clear()

    # --- on the device ------------------------------------------------------------------------

    def is_announced(self, block_id: int) -> bool:
        """Whether the block is announced on the device."""
        return block_id in self._name_of

    def store(
        self,
        block_ids: Sequence[int],
        names: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        scope: CacheScope,
    ) -> None:
        """Announce consecutive blocks on the device.

        Args:
            block_ids: Not announced yet.
            names: Names of the blocks.
            parent: Name of the block before; None at the start of a prompt.
            token_ids: Token ids of the blocks.
            scope: Scope of the sequence.
        """
        self._name_of.update(zip(block_ids, names, strict=True))
        self._announced[DEVICE, False].update(dict.fromkeys(names, scope.adapter))
        self._end_run()
        self._events.append(
            BlockStored(
                block_hashes=tuple(map(wire_hash, names)),
                parent_block_hash=None if parent is None else wire_hash(parent),
                token_ids=tuple(token_ids),
                block_size=self._block_size,
                lora_id=None,
                medium=DEVICE,
                lora_name=scope.adapter or None,
                extra_keys=None if parent is not None else _extra_keys(scope, len(names)),
            )
        )

    def remove(self, block_id: int) -> None:
        """Announce that a block of the device can't be found any more, if it was announced."""
        if (name := self._name_of.pop(block_id, None)) is not None:
            self._remove(DEVICE, (name,))

    # --- by name alone ------------------------------------------------------------------------

    def store_below(self, medium: Medium, name: bytes, *, state: bool = False) -> None:
        """Announce a block in a tier, or a snapshot. Routers have its tokens from the event of the
        device."""
        announced = self._announced[medium, state]
        if name not in announced:
            announced[name] = self._adapter_of(name)
            self._extend(BlockStored, medium, [wire_hash(name)], state=state)

    def remove_below(self, medium: Medium, name: bytes, *, state: bool = False) -> None:
        """Announce that a block or snapshot can't be found in a medium any more, if it was
        announced."""
        self._remove(medium, (name,), state=state)

    # --- many at once -------------------------------------------------------------------------

    def lose(self, medium: Medium, *, state: bool = False) -> None:
        """Announce that no block, or no snapshot, can be found in a medium any more."""
        if medium == DEVICE and not state:
            self._name_of.clear()
        self._remove(medium, tuple(self._announced[medium, state]), state=state)

    def retire(self, adapter: str) -> set[bytes]:
        """Announce that no block of an adapter can be found any more: it has other weights now.

        Returns:
            The names of the blocks.
        """
        retired: set[bytes] = set()
        for (medium, state), announced in self._announced.items():
            names = [name for name, owner in announced.items() if owner == adapter]
            self._remove(medium, names, state=state)
            retired.update(names)
        for block_id in [b for b, name in self._name_of.items() if name in retired]:
            del self._name_of[block_id]
        return retired

    def _remove(self, medium: Medium, names: Iterable[bytes], *, state: bool = False) -> None:
        announced = self._announced[medium, state]
        gone = [wire_hash(name) for name in names if announced.pop(name, None) is not None]
        if gone:
            self._extend(BlockRemoved, medium, gone, state=state)

    def _extend(
        self,
        kind: type[BlockRemoved | BlockStored],
        medium: Medium,
        hashes: list[int],
        *,
        state: bool,
    ) -> None:
        if self._run is None or self._run[:3] != (kind, medium, state):
            self._end_run()
            self._run = (kind, medium, state, [])
        self._run[3].extend(hashes)

    def _end_run(self) -> None:
        if self._run is not None:
            kind, medium, state, hashes = self._run
            group = STATE_GROUP if state else None
            if kind is BlockRemoved:
                self._events.append(BlockRemoved(tuple(hashes), medium, group))
            else:
                stored = BlockStored(
                    block_hashes=tuple(hashes),
                    parent_block_hash=None,
                    token_ids=(),
                    block_size=0,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=group,
                    kv_cache_spec_kind=STATE_KIND if state else None,
                )
                self._events.append(stored)
            self._run = None

    def _adapter_of(self, name: bytes) -> str:
        """Return the adapter of a block that may be announced in another medium."""
        return next((a[name] for a in self._announced.values() if name in a), "")


class StateLog:
    """The log of snapshots of a recurrent state, each named as the block that ends there."""

    def __init__(self, log: KVEventLog) -> None:
        self._log = log

    def store_below(self, medium: Medium, name: bytes) -> None:
        """Announce a snapshot."""
        self._log.store_below(medium, name, state=True)

    def remove_below(self, medium: Medium, name: bytes) -> None:
        """Announce that a snapshot can't be found any more, if it was announced."""
        self._log.remove_below(medium, name, state=True)

    def lose(self, medium: Medium) -> None:
        """Announce that no snapshot can be found in a medium any more."""
        self._log.lose(medium, state=True)


def _extra_keys(scope: CacheScope, num_blocks: int) -> ExtraKeys | None:
    """Return the extra keys of blocks at the start of a prompt, as vLLM has them: the first block's
    keys apply to all after it."""
    keys: tuple[str, ...] = ()
    tenant = "" if scope.tenant == DEFAULT_TENANT else scope.tenant
    if tenant:
        keys = (tenant, scope.salt)
    elif scope.salt:
        keys = (scope.salt,)
    return (keys, *(None,) * (num_blocks - 1)) if keys else None

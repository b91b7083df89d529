"""A router as vLLM's users write one: it decodes KV events and knows where prefixes are cached.

The messages are written from vLLM's definition (`vllm/distributed/kv_events.py`), not from ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Root(NamedTuple):
    """The parts of a request besides its tokens that separate its blocks from other requests'."""

    adapter: str = ""
    extra_keys: tuple[str, ...] = ()


PLAIN = Root()

Place = tuple[Root | bytes | int, tuple[int, ...]]
"""A block's parent, or the root of its prompt, and the block's own tokens."""

_decoder = msgspec.msgpack.Decoder(KVEventBatch)


@dataclass
class Router:
    """The index of one replica.

    Attributes:
        forgets: Whether to forget the tokens of a hash that is in no medium.
        where: Hashes by medium, and by medium and group of those that have one.
        cleared: Number of AllBlocksCleared.
    """

    forgets: bool = False
    where: dict[str, set[bytes | int]] = field(default_factory=dict)
    cleared: int = 0
    _place_of: dict[bytes | int, Place] = field(default_factory=dict)
    _at: dict[Place, bytes | int] = field(default_factory=dict)

    def apply(self, raw: bytes) -> None:
        for event in _decoder.decode(raw).events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    where = self._in(event)
                    hashes = set(event.block_hashes)
                    assert len(hashes) == len(event.block_hashes), "removed twice"
                    assert hashes <= where, "removed, but never stored"
                    where -= hashes
                    if self.forgets:
                        for each in hashes - set().union(*self.where.values()):
                            self._at.pop(self._place_of.pop(each, (PLAIN, ())), None)
                case AllBlocksCleared():
                    self.cleared += 1
                    self.where, self._place_of, self._at = {}, {}, {}

    def find(self, token_ids: Sequence[int], size: int, root: Root = PLAIN) -> list[set[str]]:
        """For each leading block that is known, the media that hold it."""
        found: list[set[str]] = []
        parent: Root | bytes | int = root
        for start in range(0, len(token_ids) - size + 1, size):
            each = self._at.get((parent, tuple(token_ids[start : start + size])))
            if each is None:
                break
            found.append({medium for medium, hashes in self.where.items() if each in hashes})
            parent = each
        return found

    def _in(self, event: BlockStored | BlockRemoved) -> set[bytes | int]:
        """The blocks, or the snapshots, of an event's medium."""
        assert event.medium is not None
        medium = event.medium if event.group_idx is None else f"{event.medium} {event.group_idx}"
        return self.where.setdefault(medium, set())

    def _store(self, event: BlockStored) -> None:
        known = self._in(event)
        assert not known & set(event.block_hashes), "stored twice"
        known |= set(event.block_hashes)
        if not event.token_ids:
            return
        size = event.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size > 0
        parent: Root | bytes | int | None = event.parent_block_hash
        if parent is None:
            first = event.extra_keys[0] if event.extra_keys else None
            parent = Root(event.lora_name or "", tuple(first or ()))
        for index, each in enumerate(event.block_hashes):
            place = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
            assert self._place_of.setdefault(each, place) == place, "a hash of two prefixes"
            self._at[place] = each
            parent = each

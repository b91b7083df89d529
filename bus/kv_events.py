"""KV events: which blocks a replica's cache holds, for routers outside, in vLLM's wire format.

Source: `vllm/distributed/kv_events.py` since vLLM's pull request 42892 (June 2026): a batch is a
msgpack array, its events are maps with the tag `type`. docs/kv-events.md has the format.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Medium = Literal["GPU", "CPU", "DISK"]
"""The memory that holds a block: a device of any kind, host memory, or disk."""
DEVICE: Medium = "GPU"
HOST: Medium = "CPU"
DISK: Medium = "DISK"

STATE_GROUP = 1
STATE_KIND = "mamba"
"""vLLM's name for the cache group of all layers with recurrent state, of any kind."""

ExtraKeys = tuple[tuple[str, ...] | None, ...]


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that can be found from now on.

    Attributes:
        block_hashes: Hashes of consecutive blocks of one prefix; below the device, of any blocks.
        parent_block_hash: Hash of the block before; None at the start of a prompt, and below the
            device.
        token_ids: `[blocks * block_size]`; empty below the device, where the hash is that of an
            event before.
        block_size: Tokens of a block; 0 below the device.
        lora_id: Always None; `lora_name` has the adapter.
        medium: Their memory.
        lora_name: Id of the LoRA adapter; None for none.
        extra_keys: For each block, what its KV depends on besides tokens and adapter: at the start
            of a prompt (salt) or (tenant, salt, media ...), None for later blocks. Left out where
            there is nothing, as for the default tenant without a salt.
        group_idx: `STATE_GROUP` if snapshots of the recurrent state at the ends of these blocks can
            be found; left out for the blocks themselves. Snapshots have hashes alone, as below the
            device.
        kv_cache_spec_kind: `STATE_KIND` for snapshots, likewise.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks, or snapshots with `group_idx`, that can't be found any more in this medium."""

    block_hashes: tuple[int, ...]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """No block can be found any more, in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Events of one replica, in order.

    Attributes:
        ts: When they were published, in seconds since the Unix epoch.
        data_parallel_rank: The replica.
    """

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


class KVEventEntry(msgspec.Struct, frozen=True):
    """An entry of the stream of KV events.

    Attributes:
        model: The model, in a deployment of several; else "".
        lane, replica: Whose cache it is.
        incarnation: Incarnation of the batching stage. A new one begins with AllBlocksCleared.
        sequence: Number of the entry, counting the incarnation's from 0.
        missed: Set by the reader: entries of this incarnation before this one that it has not
            seen. 0: the reader has all that the cache holds, if it has followed all events.
    """

    model: str
    lane: str
    replica: int
    incarnation: str
    sequence: int
    batch: KVEventBatch
    missed: int = 0


class Continuity:
    """Finds duplicates and gaps in the entries that one reader sees."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, str, int], tuple[str, int]] = {}

    def check(self, entry: KVEventEntry) -> KVEventEntry | None:
        """Return the entry with its `missed`; None for a duplicate."""
        source = (entry.model, entry.lane, entry.replica)
        incarnation, expected = self._next.get(source, ("", 0))
        if incarnation != entry.incarnation:
            expected = 0
        elif entry.sequence < expected:
            return None
        self._next[source] = (entry.incarnation, entry.sequence + 1)
        if entry.sequence == expected:
            return entry
        return msgspec.structs.replace(entry, missed=entry.sequence - expected)


encode_batch = msgspec.msgpack.Encoder().encode
# Raises ValueError or RecursionError.
decode_batch = msgspec.msgpack.Decoder(KVEventBatch).decode

"""Kinds of units that tiers keep: blocks, and snapshots of a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .....config import EngineConfig, ModelError
from ..kv_cache import KVCache
from .host_slots import Units, unit_bytes

STAGING_BYTES = 1 << 28
"""Host memory that reading from disk takes at most, if `kv_host_bytes` doesn't give it more."""

_LEAST_BLOCKS = 16
_LEAST_SNAPSHOTS = 4


@dataclass(frozen=True, slots=True)
class UnitKind:
    """A kind of unit.

    Attributes:
        name: In messages.
        files: Names of its files on disk: the units, and their index.
        units: Returns its tensors.
        num_bytes: Bytes of a unit.
        share: Its share of a tier's bytes.
        needed: Host slots that a disk, or other executors, can make use of.
        least: The least number of these.
        trial: A unit that no sequence reads, to measure copies with.
    """

    name: str
    files: tuple[str, str]
    units: Units
    num_bytes: int
    share: float
    needed: int
    least: int
    trial: int

    def part_of(self, num_bytes: int) -> int:
        """Return this kind's part of a tier's bytes."""
        return int(num_bytes * self.share)

    def num_slots(self, config: EngineConfig, *, shares: bool) -> int:
        """Return the number of host slots.

        Raises:
            ModelError: None fits.
        """
        slots = self.part_of(config.kv_host_bytes) // self.num_bytes
        if config.kv_disk_path or shares:
            fitting = self.part_of(STAGING_BYTES) // self.num_bytes
            return max(slots, min(self.needed, fitting), self.least)
        if not slots:
            raise self.too_small(
                "kv_host_bytes", config.kv_host_bytes, "; raise it, or set it to 0"
            )
        return slots

    def too_small(self, setting: str, num_bytes: int, change: str = "; raise it") -> ModelError:
        """Return the error of a tier that holds no unit of this kind."""
        part = f", of which {self.name}s get {self.part_of(num_bytes)}" if self.share < 1 else ""
        return ModelError(
            f"engine.{setting} is {num_bytes}{part}, and one {self.name} takes {self.num_bytes}"
            + change
        )


def kinds_of(config: EngineConfig, cache: KVCache, max_model_len: int) -> list[UnitKind]:
    """Return the kinds of units of a cache: blocks, then snapshots if it has any.

    They share the bytes of each tier as they share the device's memory.

    Args:
        config: The settings.
        cache: The cache.
        max_model_len: The model's.
    """

    def blocks() -> list[Tensor]:
        return cache.in_blocks

    def states() -> list[Tensor]:
        return [tensor[cache.num_slots :] for tensor in cache.in_slots]

    block, snapshot = unit_bytes(blocks), unit_bytes(states) if cache.num_snapshots else 0
    share = block * cache.num_blocks / (block * cache.num_blocks + snapshot * cache.num_snapshots)
    # At most half of the slots are being fetched, and a prompt needs all of its blocks, and one
    # snapshot.
    needed = 2 * -(-max_model_len // cache.block_size)
    kinds = [
        UnitKind(
            name="block",
            files=("blocks", "index"),
            units=blocks,
            num_bytes=block,
            share=share,
            needed=needed,
            least=_LEAST_BLOCKS,
            trial=cache.padding_block,
        )
    ]
    if cache.num_snapshots:
        kinds.append(
            UnitKind(
                name="snapshot",
                files=("states", "states-index"),
                units=states,
                num_bytes=snapshot,
                share=1 - share,
                needed=2 * config.max_batch_size,
                least=_LEAST_SNAPSHOTS,
                trial=0,
            )
        )
    return kinds

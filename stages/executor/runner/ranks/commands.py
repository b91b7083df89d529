"""What rank 0 tells the other ranks, in the order in which all of them do it, and their replies."""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from .....config import EngineConfig
from ..batch import IntArray, Rows


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array of 64-bit integers."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: IntArray) -> Self:
        return cls(array.shape, np.ascontiguousarray(array, np.int64).tobytes())

    def value(self) -> IntArray:
        # Writable, since torch shares its memory.
        return np.frombuffer(bytearray(self.data), np.int64).reshape(self.shape)


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing to do."""


class Load(Command, frozen=True):
    """Load this rank's shard. Replied to.

    Attributes:
        config: The settings.
        threads: Threads of a step.
    """

    config: EngineConfig
    threads: int


class Prepare(Command, frozen=True):
    """Allocate the KV cache, and choose back end, kernels and deterministic mode. Replied to."""

    num_blocks: int


class Forward(Command, frozen=True):
    """Run one step: the arguments of `InputBuilder.build`, and of `ModelRunner.start`.

    Attributes:
        adapters: The slots of the tokens' adapters, `[tokens]`; None for none.
    """

    starts: Array
    num_tokens: Array
    tables: Array
    num_decodes: int
    read: Array | None
    input_ids: Array
    logits_index: Array
    with_states: bool = False
    adapters: Array | None = None

    @classmethod
    def of(
        cls,
        rows: Rows,
        input_ids: IntArray,
        logits_index: IntArray,
        *,
        with_states: bool = False,
        adapters: IntArray | None = None,
    ) -> Self:
        return cls(
            Array.of(rows.starts),
            Array.of(rows.num_tokens),
            Array.of(rows.tables),
            rows.num_decodes,
            None if rows.read is None else Array.of(rows.read),
            Array.of(input_ids),
            Array.of(logits_index),
            with_states,
            None if adapters is None else Array.of(adapters),
        )

    def arguments(self) -> tuple[Rows, IntArray, IntArray]:
        """Return the arguments of `InputBuilder.build`."""
        rows = Rows(
            self.starts.value(),
            self.num_tokens.value(),
            self.tables.value(),
            self.num_decodes,
            None if self.read is None else self.read.value(),
        )
        return rows, self.input_ids.value(), self.logits_index.value()


class CopyBlocks(Command, frozen=True):
    """As `KVCache.copy_blocks`."""

    pairs: tuple[tuple[int, int], ...]


class ClearCache(Command, frozen=True):
    """As `KVCache.clear`."""


class Release(Command, frozen=True):
    """As `ReplicaMemory.begin_release` and `release`."""

    tags: tuple[str, ...]


class Resume(Command, frozen=True):
    """As `ReplicaMemory.resume`. Replied to."""

    tags: tuple[str, ...]


class NewWeights(Command, frozen=True):
    """Put new weights in place: parts that are held, and this rank's of those that rank 0 sends
    next.

    Attributes:
        held: Names, and the receipt of each (`calls.ReceiveParts`).
    """

    held: tuple[tuple[str, int], ...] = ()


class MoveExperts(Command, frozen=True):
    """As `move_experts`."""

    owners: tuple[int, ...]


class StageAdapter(Command, frozen=True):
    """Take this rank's parts of an adapter that rank 0 sends next, as `AdapterTable.stage`. Replied
    to.

    Attributes:
        adapter: Its id.
        version: Of its weights.
        layers: Name, rank, inputs and outputs of each layer, in the order of the tensors.
    """

    adapter: str
    version: int
    layers: tuple[tuple[str, int, int, int], ...]


class UnstageAdapter(Command, frozen=True):
    """As `AdapterTable.unstage`."""

    adapter: str
    version: int


class SwitchAdapter(Command, frozen=True):
    """As `AdapterTable.switch`."""

    adapter: str
    version: int


class Report(Command, frozen=True):
    """Nothing but a reply: the rank is alive, and what it uses."""


AnyCommand = (
    Load
    | Prepare
    | Forward
    | CopyBlocks
    | ClearCache
    | Release
    | Resume
    | NewWeights
    | MoveExperts
    | StageAdapter
    | UnstageAdapter
    | SwitchAdapter
    | Report
)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """That a command is done.

    Attributes:
        error: Why it can't be done; "" if it is.
        code: Of the error.
        resident: The most resident memory of the rank's process so far, in bytes.
        weights: Bytes of its shard.
        kv: Bytes of its KV cache.
        not_deterministic: Why deterministic mode is off; "" if it is on.
    """

    error: str = ""
    code: str = ""
    resident: int = 0
    weights: int = 0
    kv: int = 0
    not_deterministic: str = ""

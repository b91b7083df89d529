"""Rank 0's commands to the other ranks, executed in one order by all of them, and the replies."""

from __future__ import annotations

import msgspec
import numpy as np

from .....config import EngineConfig
from ..batch import IntArray, Rows


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing to do."""


class Replied(Command, frozen=True):
    """A command with a reply."""


class Load(Replied, frozen=True):
    """Load this rank's shard.

    Attributes:
        config: The settings.
        threads: Threads of a step.
    """

    config: EngineConfig
    threads: int


class Prepare(Replied, frozen=True):
    """Allocate the KV cache, and choose back end, kernels and deterministic mode."""

    num_blocks: int


class Forward(Command, frozen=True):
    """Run one step: the arguments of `InputBuilder.build`, and of `ModelRunner.start`.

    Attributes:
        adapters: The slots of the tokens' adapters, `[tokens]`; None for none.
    """

    rows: Rows
    input_ids: IntArray
    logits_index: IntArray
    with_states: bool = False
    adapters: IntArray | None = None


class CopyBlocks(Command, frozen=True):
    """Copy blocks (`KVCache.copy_blocks`)."""

    pairs: tuple[tuple[int, int], ...]


class ClearCache(Command, frozen=True):
    """Clear the KV cache (`KVCache.clear`)."""


class Release(Command, frozen=True):
    """Release memory (`ReplicaMemory.begin_release` and `release`)."""

    tags: tuple[str, ...]


class Resume(Replied, frozen=True):
    """Allocate released memory again (`ReplicaMemory.resume`)."""

    tags: tuple[str, ...]


class NewWeights(Command, frozen=True):
    """Put new weights in place: parts that are held, and this rank's of those that rank 0 sends
    next.

    Attributes:
        held: Names, and the receipt of each (`calls.ReceiveParts`).
    """

    held: tuple[tuple[str, int], ...] = ()


class MoveExperts(Command, frozen=True):
    """Move experts between ranks (`move_experts`)."""

    owners: tuple[int, ...]


class StageAdapter(Replied, frozen=True):
    """Take this rank's parts of an adapter that rank 0 sends next, as `AdapterTable.stage`.

    Attributes:
        adapter: Its id.
        version: Version of its weights.
        layers: Name, rank, inputs and outputs of each layer, in the order of the tensors.
    """

    adapter: str
    version: int
    layers: tuple[tuple[str, int, int, int], ...]


class UnstageAdapter(Command, frozen=True):
    """Drop a staged adapter (`AdapterTable.unstage`)."""

    adapter: str
    version: int


class SwitchAdapter(Command, frozen=True):
    """Switch an adapter's version (`AdapterTable.switch`)."""

    adapter: str
    version: int


class Report(Replied, frozen=True):
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


def encode(command: Command) -> bytes:
    """Return a command as it travels; `decoder` reads it."""
    return msgspec.msgpack.encode(command, enc_hook=_packed)


def decoder() -> msgspec.msgpack.Decoder[AnyCommand]:
    """Return a decoder of commands."""
    return msgspec.msgpack.Decoder(AnyCommand, dec_hook=_array)


def _packed(array: IntArray) -> tuple[tuple[int, ...], bytes]:
    return array.shape, np.ascontiguousarray(array, np.int64).tobytes()


def _array(_: type, packed: tuple[list[int], bytes]) -> IntArray:
    shape, data = packed
    # Writable, since torch shares its memory.
    return np.frombuffer(bytearray(data), np.int64).reshape(shape)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """That a command is done.

    Attributes:
        error: Why it can't be done; "" if it is.
        code: Code of the error.
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

"""Sources of new weights, as named in messages. The tensors travel separately."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import msgspec

from ..config import WeightsError, shown

InFlight = Literal["keep", "retract", "abort"]
"""Treatment of requests in flight at a pause or weight update.

keep: continue with their KV. retract: drop their KV and recompute it with the weights then in
place.
abort: end with their output so far.
"""

IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)

PauseMode = InFlight | Literal["wait"]
"""Treatment of requests in flight at a pause: as `InFlight`; or wait: they finish first, and later
ones wait for the end of the pause."""


def check_in_flight(in_flight: str, known: tuple[str, ...] = IN_FLIGHT) -> None:
    """Check a value against `known`, since the memory bus has no codec.

    Raises:
        WeightsError: It is unknown.
    """
    if in_flight not in known:
        names = " or ".join(map(repr, known))
        raise WeightsError(f"in_flight is {shown(in_flight)}; give {names}")


PAUSE_MODES: tuple[PauseMode, ...] = (*IN_FLIGHT, "wait")


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `dtype` as in "bfloat16", without "torch."."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class FolderWeights(msgspec.Struct, frozen=True, array_like=True, tag="folder"):
    """A folder of safetensors files in Transformers' format, or one such file.

    It must be readable by the executor's process.
    """

    path: str


class SharedMemoryWeights(msgspec.Struct, frozen=True, array_like=True, tag="shared_memory"):
    """Tensors in POSIX shared memory that the trainer creates and removes.

    Attributes:
        segments: Names of the shared memory objects ("buckets").
        tensors: Their contents.
        places: (segment index, offset in bytes) of each tensor.
    """

    segments: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]
    places: tuple[tuple[int, int], ...]


class GroupWeights(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Tensors that rank 0 of a torch.distributed group broadcasts, in this order.

    Attributes:
        group: The group's name (`JoinWeightsGroup`).
        tensors: The broadcast tensors.
        bucket_bytes: Tensors of one dtype are flattened into broadcasts of about this size; 0
            broadcasts each tensor separately.
        first: Number of earlier broadcasts of the group, to detect a mismatch; None if unspecified.
        packed: Buckets are vLLM's: of any dtypes, and each ends with the tensor that takes it above
            `bucket_bytes`.
    """

    group: str
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int = 0
    first: int | None = None
    packed: bool = False


class LocalWeights(msgspec.Struct, frozen=True, array_like=True, tag="local"):
    """A state dict of the executor's own process, stored under this key."""

    key: str


class DeltaWeights(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """The tensors of a `WeightDelta`, in the message itself.

    The other sources carry a delta, too, if its tensors are theirs.
    """

    tensors: tuple[tuple[str, bytes], ...]


ArcFormat = Literal["arc_v1", "arc_v2", "arc_v3"]
"""Formats of `fireworks-delta-compression`."""


class ArcWeights(msgspec.Struct, frozen=True, array_like=True, tag="arc"):
    """A delta in a file of `fireworks-delta-compression`, readable by the executor's process.

    Attributes:
        path: The file.
        base_version: The version of the weights that it changes, which the file doesn't name.
        format: Its format.
    """

    path: str
    base_version: int
    format: ArcFormat = "arc_v3"


class PastWeights(msgspec.Struct, frozen=True, array_like=True, tag="past"):
    """An earlier version of the weights, from the log of weights (`engine.weight_log`).

    Attributes:
        version: The version.
        run: Its run; "" for the executor's own.
    """

    version: int
    run: str = ""


WeightsSource = (
    FolderWeights
    | SharedMemoryWeights
    | GroupWeights
    | LocalWeights
    | DeltaWeights
    | ArcWeights
    | PastWeights
)


class StagedWeights(msgspec.Struct, frozen=True, array_like=True, tag="staged"):
    """The kept parts of an update (`UpdateWeights.part_of`).

    Attributes:
        update: The update's name.
        parts: Number of parts; with fewer nothing changes.
    """

    update: str
    parts: int


_LAID_DOWN: dict[str, Mapping[str, Any]] = {}


@contextmanager
def source_of(
    weights: Mapping[str, Any] | WeightsSource | StagedWeights,
) -> Iterator[WeightsSource | StagedWeights]:
    """Yield the source of weights; a state dict is stored for the executors of this process.

    Its tensors must not change until all executors are done. A `WeightDelta` has its own source.

    Raises:
        WeightsError: The weights are neither.
    """
    own = getattr(weights, "source", None)
    if isinstance(own, DeltaWeights):
        yield own
        return
    if isinstance(weights, WeightsSource | StagedWeights):
        yield weights
        return
    if not isinstance(weights, Mapping):
        raise WeightsError(
            "new weights are a state dict, a WeightDelta, FolderWeights(path), "
            "SharedWeights(...).source or WeightsGroup(...).broadcast(...).source, not "
            f"{type(weights).__name__}",
            remedy="pass model.state_dict()"
            if hasattr(weights, "state_dict")
            else "pass dict(…) of the pairs"
            if isinstance(weights, Iterable)
            else "pass one of these",
        )
    key = uuid.uuid4().hex
    _LAID_DOWN[key] = weights
    try:
        yield LocalWeights(key)
    finally:
        del _LAID_DOWN[key]


def laid_down(key: str) -> Mapping[str, Any] | None:
    """Return the tensors under a key, for each executor of this process; None if there are none."""
    return _LAID_DOWN.get(key)

"""Where new weights come from: what a message says of them. The tensors go other ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from ..config import WeightsError, shown

InFlight = Literal["keep", "retract", "abort"]
"""What becomes of requests in flight when generation pauses or the weights change.

keep: they go on from their KV as it is. retract: they give up their KV and compute their tokens
again, under the weights then in place. abort: they end with what they have.
"""

IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)


def check_in_flight(in_flight: str) -> None:
    """Refuses what is none of `IN_FLIGHT`; on the memory bus no codec has checked it.

    Raises:
        WeightsError: It is unknown.
    """
    if in_flight not in IN_FLIGHT:
        known = " or ".join(map(repr, IN_FLIGHT))
        raise WeightsError(f"in_flight is {shown(in_flight)}; give {known}")


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
    """Tensors in POSIX shared memory that the trainer has made, and removes afterwards.

    Attributes:
        segments: Names of the shared memory objects ("buckets").
        tensors: What is in them.
        places: (index of its segment, offset in bytes) for each tensor.
    """

    segments: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]
    places: tuple[tuple[int, int], ...]


class GroupWeights(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Tensors that rank 0 of a torch.distributed group broadcasts, in this order.

    Attributes:
        group: The name under which the executor joined it (`JoinWeightsGroup`).
        tensors: What is broadcast.
        bucket_bytes: Tensors are flattened together into broadcasts of about so many bytes, never
            of several dtypes; 0 broadcasts each tensor by itself.
        first: How many broadcasts the group has made before these, so that weights can't be taken
            for later ones; None when the trainer does not say.
    """

    group: str
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int = 0
    first: int | None = None


class LocalWeights(msgspec.Struct, frozen=True, array_like=True, tag="local"):
    """A state dict of the executor's own process, which was laid down under this key."""

    key: str


WeightsSource = FolderWeights | SharedMemoryWeights | GroupWeights | LocalWeights


class StagedWeights(msgspec.Struct, frozen=True, array_like=True, tag="staged"):
    """What the executor has kept of an update that came in parts (`UpdateWeights.part_of`).

    Attributes:
        update: The update's name.
        parts: How many there are; with fewer there nothing changes.
    """

    update: str
    parts: int


_LAID_DOWN: dict[str, Mapping[str, Any]] = {}


def lay_down(key: str, state_dict: Mapping[str, Any]) -> LocalWeights:
    """Keeps tensors for the executors of this process; they must not change till all are done."""
    _LAID_DOWN[key] = state_dict
    return LocalWeights(key)


def laid_down(key: str) -> Mapping[str, Any] | None:
    """What lies under a key, for each executor of this process; None when nothing does."""
    return _LAID_DOWN.get(key)


def pick_up(key: str) -> None:
    """Keeps them no longer."""
    _LAID_DOWN.pop(key, None)
